"""Synthesizer beyond the contract: what its forms have, its longest length, and what does not fit."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import synthesizer_attention
from tests.common.inputs import padding, qkv
from tests.common.refusals import refused
from tests.compare import assert_close, weights

SHAPE = {"num_heads": 2, "head_dim": 4, "max_tokens": 9}
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def given(module, q, v):
    """q, k and v as ``module`` takes them."""
    return (q if "q" in module.projections(4) else None), None, v


@causality
def test_the_forms_by_hand(causal):
    q, _, v = (x.detach() for x in qkv(7, d=4))
    for form, names in (
        ("dense", ["columns", "bias"]),
        ("random", ["table"]),
        ("factorized_random", ["rows", "columns"]),
    ):
        module = build_attention("synthesizer", causal, **SHAPE, form=form, rank=3).double()
        assert list(weights(module.state_dict())) == names
        if form == "dense":
            logits = F.relu(q) @ module.columns.mT + module.bias[:, None]
        else:
            logits = module.table if form == "random" else module.rows @ module.columns.mT
        logits = logits[..., :7, :7]
        if causal:
            logits = logits.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
        assert_close(form, module(*given(module, q, v)), logits.softmax(-1) @ v)


@causality
@pytest.mark.parametrize("form", ["random", "factorized_random"])
def test_positions_count_real_tokens(form, causal):
    """In decoding too; the contract has the dense form."""
    q, _, v = qkv(9, d=4)
    mask = padding("holes", 2, 9)
    module = build_attention("synthesizer", causal, **SHAPE, form=form, rank=3).double()
    out = module(*given(module, q, v), mask, mask)
    for b in range(2):
        real = ~mask[b]
        assert_close(
            "row", out[b : b + 1, :, real], module(*given(module, q[b : b + 1, :, real], v[b : b + 1, :, real]))
        )
    if causal:
        state, parts = None, []
        for some in (slice(0, 4), slice(4, 5), slice(5, 9)):
            part, state = module.extend(None, None, v[:, :, some], mask[:, some], state)
            parts.append(part)
        assert_close("in parts", torch.cat(parts, dim=2), out)


def test_the_longest_length_is_of_real_tokens():
    """A batch may be padded beyond it, and so may a sequence that is continued."""
    _, _, v = qkv(14)
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[:, [0, 3, 8, 12, 13]] = True
    module = build_attention("synthesizer", True, **SHAPE, form="random").double()
    out = module(None, None, v, mask, mask)
    assert_close("out", out[:, :, ~mask[0]], module(None, None, v[:, :, ~mask[0]]))
    first, state = module.extend(None, None, v[:, :, :10], mask[:, :10])
    second, state = module.extend(None, None, v[:, :, 10:], mask[:, 10:], state)
    assert_close("in parts", torch.cat([first, second], dim=2), out)
    for call in (lambda: module(None, None, v), lambda: module.extend(None, None, v[:, :, :1], None, state)):
        with refused("the input", "tokens", "max_tokens=9"):
            call()


def test_what_does_not_fit_is_refused():
    q, k, v = qkv(5, d=4)
    dense, random = (build_attention("synthesizer", **SHAPE, form=form).double() for form in ("dense", "random"))
    for module, inputs, name in ((dense, (None, None, v), "q"), (dense, (q, k, v), "k"), (random, (q, None, v), "q")):
        with refused(name, "", "form="):
            module(*inputs)
    for shapes in (((2, 5, 4), None, None), ((5, 4), None, None), ((2, 2, 5, 4), (2, 6, 3), None)):
        features, columns, bias = (None if shape is None else torch.zeros(shape).double() for shape in shapes)
        with pytest.raises(ValueError, match="^(features|columns|bias) .*allowed"):
            synthesizer_attention(features, v, columns, bias)
    with refused("bias", "(2, 5)", "(2, 6)"):
        synthesizer_attention(torch.zeros(2, 2, 5, 4), v, torch.zeros(2, 6, 4), torch.zeros(2, 5))
