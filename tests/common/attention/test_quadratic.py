"""The quadratic module is gau_attention per head."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.attention._base import drop_sources
from common.ops import gau_attention
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import padding, qkv
from tests.common.refusals import refused
from tests.compare import assert_close

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@causality
@pytest.mark.parametrize("kernel", SCORE_KERNELS)
def test_it_is_the_function_with_the_modules_options(kernel, causal):
    inputs, mask = qkv(9), padding("left", 2, 9)
    for divisor in (None, 3.0):
        out = build_attention("quadratic", causal=causal, kernel=kernel, divisor=divisor)(*inputs, mask, mask)
        options = {"causal": causal, "kernel": kernel, "divisor": divisor, "key_padding_mask": mask}
        assert torch.equal(out, gau_attention(*inputs, **options))


@causality
def test_its_softmax_is_the_softmax_modules(causal):
    inputs, keys = qkv(9), padding("left", 2, 9)
    masks = keys, keys | padding("right", 2, 9)  # a padded key is a padded query too, as in self-attention
    out = build_attention("quadratic", causal=causal, kernel="softmax")(*inputs, *masks)
    expected = build_attention("softmax", causal=causal)(*inputs, *masks)
    assert_close("out", out, expected)


def test_relu_squared_heads_are_the_formula():
    q, k, v = qkv(9)
    expected = F.relu(q @ k.transpose(-2, -1) / 4.0).square().tril() @ v
    assert_close("out", build_attention("quadratic", causal=True, divisor=4.0)(q, k, v), expected)


@causality
def test_dropout_drops_whole_sources(causal):
    inputs = q, k, v = qkv(9)
    module = build_attention("quadratic", causal=causal, divisor=2.0)
    torch.manual_seed(5)
    out = module(*inputs, dropout_p=0.4)
    torch.manual_seed(5)
    assert torch.equal(out, module(q, k, drop_sources(v, 0.4)))
    assert not torch.equal(out, module(*inputs))


def test_a_divisor_is_above_0_and_attention_is_to_itself():
    with refused("divisor", "-1.0", "above 0"):
        build_attention("quadratic", divisor=-1.0)(*qkv(3))
    with refused("k", "5 tokens and q 3", "the same number"):
        build_attention("quadratic")(*qkv(3, 5))
