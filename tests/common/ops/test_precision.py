"""Flow-Attention and linear attention with long sums and extreme inputs."""

import pytest
import torch

from common.ops import flow_attention, linear_attention
from common.ops.flow.options import FORMS
from common.ops.shared.feature_maps import FEATURE_MAPS
from tests.common.inputs import doubled, qkv
from tests.compare import assert_close, gradients

OPS = [flow_attention, linear_attention]
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HALVES = [torch.bfloat16, torch.float16]


@ops
@causality
def test_long_sums_of_float16_keep_their_precision(causal, op):
    """With 16384 tokens, Σ k and q·Σ k exceed the range of float16; the contract tests cover bfloat16's few bits."""
    inputs = qkv(16384, batch=1, heads=1, d=32, e=8, dtype=torch.float16)
    exact = doubled(*inputs)
    out, expected = op(*inputs, causal=causal), op(*exact, causal=causal)
    # Averages over this many values are small: only the last rounding to half precision may be visible.
    assert_close("out", out, expected)
    assert_close("last tokens", out[:, :, -100:], expected[:, :, -100:])
    for name, actual, wanted in zip("qkv", gradients(out, inputs), gradients(expected, exact)):
        assert_close(f"gradient of {name}", actual, wanted)


@ops
@causality
def test_long_sums_in_float32_agree_with_float64(causal, op):
    inputs = qkv(16384, batch=1, heads=1, d=32, e=8, dtype=torch.float32)
    assert_close("out", op(*inputs, causal=causal), op(*doubled(*inputs), causal=causal).float())


@causality
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_flow_reaches_the_range_of_float16(dtype, causal):
    """elu+1 features of 100: one q·k is 6.4e5, beyond float16's 65504."""
    inputs = [torch.full((1, 1, 4096, 64), value, dtype=dtype) for value in (100.0, 100.0, 1.0)]
    out = flow_attention(*inputs, causal=causal, phi="elu+1")
    assert_close("out", out, flow_attention(*doubled(*inputs), causal=causal, phi="elu+1"))


@ops
@causality
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [30.0, 1e4])
@pytest.mark.parametrize("phi", FEATURE_MAPS)
def test_extreme_queries_and_keys_stay_finite(phi, size, dtype, causal, op):
    variants = [{"form": form, "clamp": clamp} for form in FORMS for clamp in (1.0, None)]
    for options in variants if op is flow_attention else [{}]:
        for signs in ("mixed", "positive", "negative"):
            q, k, v = qkv(33, dtype=dtype)
            change = {"mixed": lambda x: x, "positive": torch.abs, "negative": lambda x: -x.abs()}[signs]
            q, k = (change(x.detach() * size).requires_grad_() for x in (q, k))
            out = op(q, k, v, causal=causal, phi=phi, chunk_size=16, **options)
            assert torch.isfinite(out).all(), f"{signs} {options}"
            if dtype == torch.float16 and options.get("form") == "paper":
                continue  # without the 1e-6, true gradients at flows near 0 exceed 65504
            for name, gradient in zip("qkv", gradients(out, (q, k, v))):
                assert torch.isfinite(gradient).all(), f"gradient of {name}, {signs} {options}"
