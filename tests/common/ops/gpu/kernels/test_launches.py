"""The number of launches, which bounds the time of short inputs."""

from tests.common.inputs import padding
from tests.common.ops.gpu.kernels.rows import attend, doubled, draw, literally, of_all
from tests.compare import assert_all_close, assert_close


def test_causal_flow_attention_launches_few_kernels(launches):
    """PyTorch adds two operations forward, which count the tokens."""
    tensors = draw("flow", 17)
    out = attend("flow", tensors)
    assert len(launches) == 9
    launches.clear()
    of_all(out, tensors)
    assert len(launches) == 10


def test_more_chunks_than_are_added_up_at_once():
    """Eight are read at a time."""
    tensors, mask = draw("flow", 149), padding("left", 1, 149)
    exact = doubled(tensors)
    out, expected = attend("flow", tensors, mask), literally("flow", exact, mask)
    assert_close("out", out.cpu(), expected)
    assert_all_close(tensors, of_all(out, tensors), of_all(expected, exact), 1e-4)
