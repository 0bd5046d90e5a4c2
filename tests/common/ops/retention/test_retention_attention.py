"""Retention beyond the contract: its decays, the normalisation of scores, and how the output norm cancels it."""

import pytest
import torch

from common.attention import build_attention
from common.ops import retention_attention
from tests.common.inputs import qkv
from tests.compare import assert_close


def test_heads_forget_at_the_paper_s_pace():
    """The key of the first token, read by each query: q·k / √d times γ to the power of the distance."""
    q = torch.ones(1, 3, 40, 4, dtype=torch.float64)
    k = torch.zeros_like(q).index_fill_(2, torch.tensor([0]), 1.0)
    v = torch.ones(1, 3, 40, 1, dtype=torch.float64)
    out = retention_attention(q, k, v, score_norm=False, chunk_size=8)
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], dtype=torch.float64)
    assert_close("powers", out[0, :, :, 0], 2 * gamma[:, None] ** torch.arange(40))
    out = retention_attention(q, k, v, score_norm=False, chunk_size=8, decays="log_space")
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 128, 1 - 1 / 512], dtype=torch.float64)
    assert_close("log_space", out[0, :, :, 0], 2 * gamma[:, None] ** torch.arange(40))


def test_one_head_alone_forgets_as_the_first():
    inputs = [x.detach() for x in qkv(9, heads=1)]
    assert_close("out", retention_attention(*inputs, decays="log_space"), retention_attention(*inputs))


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_normalised_scores_sum_to_at_most_one(scale):
    """Values of 1 make the sum visible. If it is large in absolute value, it becomes 1 or -1."""
    q, k, _ = (x.detach() for x in qkv(50, scale=scale))
    sums = retention_attention(q, k, torch.ones(2, 2, 50, 1, dtype=torch.float64)).abs()
    assert sums.max() <= 1 + 1e-12
    assert (sums > 1 - 1e-12).double().mean() > 0.5 if scale == 10.0 else sums.median() < 0.5


@pytest.mark.parametrize("norm", ["rms", "group"])
def test_an_output_norm_leaves_nothing_of_the_normalisation_of_scores(norm):
    """Only the norm's epsilon makes a difference, which large values hide."""
    q, k, v = (100 * x.detach() for x in qkv(30, d=4, e=4))
    options = {"num_heads": 2, "head_dim": 4, "output_norm": norm, "output_gate": "none"}
    modules = [
        build_attention("retention", True, score_norm=score_norm, **options).double() for score_norm in (True, False)
    ]
    assert_close("out", modules[0](q, k, v), modules[1](q, k, v), 1e-4)


def test_thousands_of_tokens_in_float32():
    """The last of 64 heads forgets 2^-68 of its sum per token, which float32 cannot represent."""
    inputs = [x.detach() for x in qkv(5000, batch=1, heads=64, d=2, e=2, dtype=torch.float32)]
    out = retention_attention(*inputs)
    assert_close("out", out, retention_attention(*(x.double() for x in inputs)), 1e-4)
    assert torch.isfinite(out).all()


def test_without_an_output_gate_it_needs_no_tokens_before_projection():
    module = build_attention("retention", True, num_heads=2, head_dim=4, output_gate="none")
    assert "x" not in module.needs
    assert "x" in build_attention("retention", True, num_heads=2, head_dim=4).needs


def test_an_odd_head_dim_is_refused_with_rotary_positions():
    with pytest.raises(ValueError, match=r"head_dim.* is 5.*allowed"):
        build_attention("retention", True, num_heads=2, head_dim=5)
    build_attention("retention", True, num_heads=2, head_dim=5, rotary=False)


def test_it_is_flash_linear_attention_s():
    """Compares with its naive form, if that package is installed."""
    naive = pytest.importorskip("fla.ops.retention.naive")
    inputs = [x.detach() for x in qkv(37, heads=3, dtype=torch.float32)]
    out = retention_attention(*inputs, score_norm=False, chunk_size=8)
    assert_close("out", out, naive.naive_retention(*inputs))
