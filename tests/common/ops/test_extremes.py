"""Long sums in float16, and queries and keys whose products and exponentials overflow."""

from functools import partial

import pytest
import torch

from common.ops import flow_attention, linear_attention, nystrom_attention, reformer_attention, sinkhorn_attention
from common.ops.flow.options import FORMS
from common.ops.reformer import draw_rotations
from common.ops.shared.feature_maps import FEATURE_MAPS
from tests.common.inputs import doubled, qkv
from tests.compare import assert_all_close, assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
ROTATIONS = draw_rotations(3, 5, 2, torch.Generator().manual_seed(0))


@causality
@pytest.mark.parametrize("op", [flow_attention, linear_attention], ids=lambda op: op.__name__)
def test_long_sums_of_float16_keep_their_precision(op, causal):
    """With 8192 tokens, Σ k and q·Σ k exceed the range of float16; the contract tests bfloat16's few bits."""
    inputs = qkv(8192, batch=1, heads=1, d=32, e=8, dtype=torch.float16)
    exact = doubled(*inputs)
    out, expected = op(*inputs, causal=causal), op(*exact, causal=causal)
    # Averages over this many values are small: only the last rounding to half precision may be visible.
    assert_all_close(("out", "last tokens"), (out, out[:, :, -100:]), (expected, expected[:, :, -100:]))
    for name, found, wanted in zip("qkv", gradients(out, inputs), gradients(expected, exact)):
        assert_close(f"gradient of {name}", found, wanted)


@causality
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_flow_reaches_the_range_of_float16(dtype, causal):
    """elu+1 features of 100: one q·k is 6.4e5, beyond float16's 65504."""
    inputs = [torch.full((1, 1, 2048, 64), value, dtype=dtype) for value in (100.0, 100.0, 1.0)]
    out = flow_attention(*inputs, causal=causal, phi="elu+1")
    assert_close("out", out, flow_attention(*doubled(*inputs), causal=causal, phi="elu+1"))


def sinkhorn(q, k, v):
    return sinkhorn_attention(q, k, v, torch.randn(2, 5, 4), max_tokens=33, chunk_size=9)


FLOWS = [
    partial(flow_attention, form=form, clamp=clamp, phi=phi, causal=causal, chunk_size=16)
    for form in FORMS
    for clamp in (1.0, None)
    for phi in FEATURE_MAPS
    for causal in (False, True)
]
CALLS = {
    "flow": FLOWS,
    "linear": [partial(linear_attention, phi=phi, causal=causal) for phi in FEATURE_MAPS for causal in (False, True)],
    "nystrom": [partial(nystrom_attention, landmarks=8)],
    "sinkhorn": [sinkhorn],
    "reformer": [
        lambda q, k, v, causal=causal: reformer_attention(q, v, ROTATIONS, chunk_size=4, causal=causal)
        for causal in (False, True)
    ],
}


@pytest.mark.parametrize(
    "size, dtype", [(x, torch.float32) for x in (1e-4, 30.0, 1e4)] + [(x, torch.float16) for x in (30.0, 1e4)], ids=str
)
@pytest.mark.parametrize("name", CALLS)
def test_extreme_queries_and_keys_stay_finite(name, size, dtype):
    """Of both signs, all positive, and all negative; outputs and gradients."""
    for call in CALLS[name]:
        for change in (lambda x: x, torch.abs, lambda x: -x.abs()):
            q, k, v = (x.detach() for x in qkv(33, dtype=dtype))
            leaves = [x.requires_grad_() for x in (change(q * size), change(k * size), v)]
            out = call(*leaves)
            assert torch.isfinite(out).all()
            if dtype == torch.float16 and name == "flow" and call.keywords["form"] == "paper":
                continue  # without the 1e-6, true gradients at flows near 0 exceed 65504
            if dtype == torch.float32 or name in ("flow", "linear"):
                assert all(torch.isfinite(x).all() for x in gradients(out, leaves))
