"""Flow-Attention to a source beyond the contract: similarities to and differences from Flow-Attention."""

import pytest
import torch

from common.ops import flow_attention, flow_source_attention
from common.ops.flow_source import ALLOCATIONS, COMPETITIONS
from tests.common.inputs import FLOW_OPTIONS, name_of, padding, qkv
from tests.compare import assert_close, assert_gradients_close

NAMES = ("q", "k", "v")
OPTIONS = [
    options
    for options in FLOW_OPTIONS
    if options.get("competition", "softmax") in COMPETITIONS and options.get("allocation", "sigmoid") in ALLOCATIONS
]


@pytest.mark.parametrize("side", ["none", "all"])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_of_the_source_itself_it_is_flow_attention(options, side):
    inputs, mask = qkv(17), padding(side, 2, 17)
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    out = flow_source_attention(*inputs, inputs[0], **masks, **options)
    expected = flow_attention(*inputs, **masks, **options)
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, dict(zip(NAMES, inputs)))


def test_flow_attention_of_targets_depends_on_later_ones_and_this_does_not():
    """This is why the mechanism exists; its output also depends on ``source_q``."""
    q, k, v = qkv(6, 11)
    source_q = qkv(11, seed=1)[0]
    later = q.detach().clone()
    later[:, :, 4:] += 3.0
    leaked = flow_attention(later, k, v)[:, :, :4] - flow_attention(q, k, v)[:, :, :4]
    assert leaked.norm() > 1e-3 * v.norm()
    out, changed = flow_source_attention(q, k, v, source_q), flow_source_attention(later, k, v, source_q)
    assert torch.equal(out[:, :, :4], changed[:, :, :4]) and not torch.equal(out, changed)
    assert not torch.allclose(out, flow_source_attention(q, k, v, 2 * source_q))
