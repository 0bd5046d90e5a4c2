"""Synthesizer beyond the contract: its forms, its longest length, and refused arguments."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from tests.common.inputs import qkv
from tests.common.refusals import refused
from tests.compare import assert_close, weights

SHAPE = {"num_heads": 2, "head_dim": 4, "max_tokens": 9}
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def given(module, q, v):
    """q, k and v as ``module`` expects them."""
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


def test_what_does_not_fit_is_refused():
    q, k, v = qkv(5, d=4)
    dense, random = (build_attention("synthesizer", **SHAPE, form=form).double() for form in ("dense", "random"))
    for module, inputs, name in ((dense, (None, None, v), "q"), (dense, (q, k, v), "k"), (random, (q, None, v), "q")):
        with refused(name, "", "form="):
            module(*inputs)
