"""The mixed chunk module: a Transformer's heads inside chunks, scaled copies of them between chunks."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.modules.rotary import rotate
from common.ops import mixed_chunk_attention
from tests.common.attention.build import build
from tests.common.inputs import qkv
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@causality
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
def test_it_is_the_function_of_four_heads(rotary, causal):
    q, k, v = qkv(13, d=4)
    module = build("mixed_chunk", causal, kernel="laplace", rotary=rotary)
    gamma, beta = module.gamma[:, None, :, None], module.beta[:, None, :, None]  # (2, 1, H, 1, d)
    heads = [q, k, q * gamma[0] + beta[0], k * gamma[1] + beta[1]]
    heads = [rotate(x, torch.arange(13)) for x in heads] if rotary else heads
    expected = mixed_chunk_attention(*heads, v, chunk_size=4, kernel="laplace", causal=causal)
    out = module(q, k, v)
    assert_close("out", out, expected)
    leaves = [q, k, v, module.gamma, module.beta]
    for name, actual, wanted in zip(("q", "k", "v", "γ", "β"), gradients(out, leaves), gradients(expected, leaves)):
        assert_close(f"gradient of {name}", actual, wanted)


def test_without_a_linear_term_one_chunk_is_softmax_attention():
    """γ = β = 0 leaves softmax inside the chunk, the kernel in the paper's table."""
    q, k, v = qkv(13, d=4)
    module = build("mixed_chunk", causal=True, rotary=False, chunk_size=13)
    torch.nn.init.zeros_(module.gamma), torch.nn.init.zeros_(module.beta)
    assert_close("out", module(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_parameters_start_as_in_the_gated_attention_unit():
    module = build_attention("mixed_chunk", num_heads=64, head_dim=64)
    assert {name: tuple(x.shape) for name, x in module.named_parameters()} == {
        "gamma": (2, 64, 64),
        "beta": (2, 64, 64),
    }
    assert (module.beta == 0).all() and abs(module.gamma.std() - 0.02) < 1e-3 and abs(module.gamma.mean()) < 1e-3
    assert (module.options.chunk_size, module.options.kernel, module.options.rotary) == (256, "softmax", True)
