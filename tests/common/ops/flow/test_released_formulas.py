"""The released forms equal the modules that the authors released."""

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow.reference import flow_attention_reference
from recipes.bench.peers import released_attention
from tests.common.inputs import qkv
from tests.compare import assert_close, gradients

#: The authors' function -> our options.
PAIRS = [
    (released_attention.full, {}),
    (released_attention.image_model, {"form": "released_vision"}),
    (released_attention.causal, {"causal": True}),
    (released_attention.language_model, {"causal": True, "clamp": 5.0}),
]
pairs = pytest.mark.parametrize("theirs, options", PAIRS, ids=lambda x: getattr(x, "__name__", ""))


@pairs
@pytest.mark.parametrize("n, more_sources", [(1, 0), (50, 0), (130, 0), (50, -30), (20, 30)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_double_precision_equals_theirs(theirs, options, n, more_sources, scale):
    m = n if "causal" in options else n + more_sources
    inputs = qkv(n, m, d=16, e=16, scale=scale)
    expected = theirs(*inputs)
    assert_close("reference", flow_attention_reference(*inputs, **options), expected, 1e-12)
    out = flow_attention(*inputs, **options)
    assert_close("out", out, expected, 1e-12)
    actual_gradients, expected_gradients = gradients(out, inputs), gradients(expected, inputs)
    for name, actual, gradient in zip("qkv", actual_gradients, expected_gradients):
        # With one token the weights are constant, so gradients of q and k are only rounding errors.
        if n > 1:
            assert_close(f"gradient of {name}", actual, gradient)


@pairs
def test_single_precision_equals_theirs(theirs, options):
    inputs = qkv(300, d=32, e=32, dtype=torch.float32)
    assert_close("out", flow_attention(*inputs, **options), theirs(*inputs), 1e-5)


def test_each_pair_of_theirs_differs_where_ours_does():
    """Guards the comparison itself: no two of the authors' modules agree to the tolerance used above."""
    inputs = qkv(50, d=16, e=16, scale=4.0)
    for options, (next_module, _) in zip(PAIRS, PAIRS[1:] + PAIRS[:1]):
        difference = (flow_attention(*inputs, **options[1]) - next_module(*inputs)).norm() / next_module(*inputs).norm()
        assert difference > 1e-9
