"""The quadratic module equals gau_attention applied to each head."""

import pytest
from torch.nn import functional as F

from common.attention import build_attention
from tests.common.inputs import padding, qkv
from tests.compare import assert_close

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


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
