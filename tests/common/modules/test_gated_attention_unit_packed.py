"""Packed documents in the gated attention unit: each is treated as a row of its own."""

from itertools import product

import pytest
import torch

from common.modules import GatedAttentionUnit
from common.modules.forget_gate import FORGETS
from tests.compare import assert_all_close, assert_close, gradients

LENGTHS = ((1, 4, 5, 6, 8), (12, 1, 11))
IDS = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])
UNITS = {
    "flash": {"chunk_size": 5},
    "flash, softmax": {"chunk_size": 5, "kernel": "softmax", "heads": 2},
    "flash, overlap and summaries": {"chunk_size": 5, "overlap": True, "chunk_summaries": True},
    "quadratic, toeplitz": {"chunk_size": None, "max_positions": 12, "bias": "toeplitz"},
    "quadratic, rotary": {"chunk_size": None, "max_positions": 24, "bias": "rotary", "heads": 2},
    "separate": {"chunk_size": 5, "gate": False, "separate_ffn": True, "rotary": False},
}


#: Causal options only.
UNITS_THAT_FORGET = {f"flash, forget by {forget}": {"chunk_size": 5, "forget": forget} for forget in FORGETS}


def build(name: str, causal: bool) -> GatedAttentionUnit:
    torch.manual_seed(0)
    unit = (
        GatedAttentionUnit(8, expanded_dim=12, query_dim=4, causal=causal, **(UNITS | UNITS_THAT_FORGET)[name])
        .double()
        .eval()
    )
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return unit


def alone(unit, x, mask=None):
    """Run each document by itself."""
    rows = []
    for b, lengths in enumerate(LENGTHS):
        parts, begin = [], 0
        for length in lengths:
            tokens = slice(begin, begin + length)
            parts.append(unit(x[b : b + 1, tokens], None if mask is None else mask[b : b + 1, tokens]))
            begin += length
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "causal"), [*product(UNITS, (False, True)), *((name, True) for name in UNITS_THAT_FORGET)]
)
def test_documents_are_as_rows_of_their_own(name, causal):
    unit, x = build(name, causal), torch.randn(2, 24, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(24).expand(2, -1) % 7 == 3
    out, expected = unit(x, segment_ids=IDS), alone(unit, x)
    assert_close("out", out, expected)
    names = {"x": x, **dict(unit.named_parameters())}
    assert_all_close(names, gradients(out, names.values()), gradients(expected, names.values()))
    assert_close("with padding", unit(x, mask, segment_ids=IDS)[~mask], alone(unit, x, mask)[~mask])


@pytest.mark.parametrize("parts", [[1] * 24, [7, 1, 9, 7]], ids=["steps", "parts"])
@pytest.mark.parametrize("name", UNITS | UNITS_THAT_FORGET)
def test_extend_is_forward(name, parts):
    unit, x = build(name, True), torch.randn(2, 24, 8, dtype=torch.float64)
    outs, begin, state = [], 0, None
    for length in parts:
        tokens = slice(begin, begin + length)
        out, state = unit.extend(x[:, tokens], state=state, segment_ids=IDS[:, tokens])
        outs.append(out)
        begin += length
    assert_close("out", torch.cat(outs, dim=1), unit(x, segment_ids=IDS))
