"""Gated linear attention beyond the contract: its gate, its state, its widths, long sequences."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import gla_attention
from tests.common.inputs import qkv
from tests.compare import assert_close, gradients

H, D, RANK, WIDTH = 2, 5, 3, 8


def gate(scale: float = 1.0, dtype: torch.dtype = torch.float64, bias: float = 0.0) -> dict[str, Tensor]:
    """The gate's weights, as leaves."""
    generator = torch.Generator().manual_seed(4)
    shapes = {"gate_down": (RANK, WIDTH), "gate_up": (H * D, RANK), "gate_bias": (H * D,)}
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["gate_bias"] = tensors["gate_bias"] + bias
    return {name: (scale * x).to(dtype).requires_grad_() for name, x in tensors.items()}


def tokens(n: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(batch, n, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("bias", [-2000.0, 2000.0], ids=["closed", "open"])
def test_gates_at_their_ends(bias):
    """With a bias of -2,000 each token keeps exp(-125) of the sum; with 2,000 nothing is forgotten."""
    inputs = [*qkv(70, d=D, dtype=torch.float32), tokens(70, dtype=torch.float32)]
    weights = gate(dtype=torch.float32, bias=bias)
    out = gla_attention(*inputs, **weights, chunk_size=16)
    q, k, v = inputs[:3]
    scores = q @ k.transpose(-2, -1) * D**-0.5
    scores = scores.tril() if bias > 0 else scores * torch.eye(70)
    assert_close("out", out, scores @ v)
    assert all(torch.isfinite(x).all() for x in gradients(out, [*inputs, *weights.values()]))


def test_queries_and_keys_have_half_the_channels_of_values():
    module = build_attention("gla", True, num_heads=2, head_dim=6)
    assert module.projections(6) == {"q": 3, "k": 3, "v": 6}
    assert build_attention("gla", True, num_heads=2, head_dim=6, key_channels=5).projections(6)["k"] == 5
    assert module.gate_up_proj.weight.shape == (6, 16) and module.gate_down_proj.weight.shape == (16, 12)


def test_reset_parameters_are_those_of_a_new_module():
    """Norms are reset, and all other parameters are drawn again."""
    module = build_attention("gla", True, num_heads=2, head_dim=6)
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    with torch.no_grad():
        for x in module.parameters():
            x.fill_(7.0)
    module.reset_parameters()
    for name, x in module.named_parameters():
        same = "norm" in name
        assert torch.equal(x, before[name]) == same and (x != 7.0).all(), name


def test_half_precision_does_not_overflow_before_the_norm():
    """Sums of 4,000 equal keys and values of 8 exceed float16's largest number, 65,504."""
    module = build_attention("gla", True, num_heads=1, head_dim=4, output_norm="rms", output_gate="none")
    with torch.no_grad():
        module.gate_up_proj.bias.fill_(200.0)
    q, k, v, x = (torch.full((1, 1, 4000, c), 8.0) for c in (2, 2, 4, 4))
    out = module.half()(q.half(), k.half(), v.half(), x=x[0].half())
    assert torch.isfinite(out).all() and (out[:, :, -1] - 1).abs().max() < 0.01


def test_it_is_flash_linear_attention_s():
    """Compares with its naive form, if that package is installed; its layout is (B, n, H, channels)."""
    naive = pytest.importorskip("fla.ops.gla.naive")
    inputs = [*qkv(37, d=D, dtype=torch.float32), tokens(37, dtype=torch.float32)]
    weights = gate(dtype=torch.float32)
    out, state = gla_attention(*inputs, **weights, chunk_size=8, return_state=True)
    logits = inputs[3] @ weights["gate_down"].T @ weights["gate_up"].T + weights["gate_bias"]
    q, k, v = (x.detach().transpose(1, 2) for x in inputs[:3])
    log_decay = (F.logsigmoid(logits) / 16).unflatten(2, (H, D))
    expected, last = naive.naive_recurrent_gla(q, k, v, log_decay, output_final_state=True)
    assert_close("out", out, expected.transpose(1, 2))
    assert_close("state", state["sum_kv"], last)
