"""Packed documents: the documents of a row do not see each other, as if each were a row of its own."""

import pytest
import torch
from torch import Tensor

from common.attention import ATTENTIONS
from tests.common.contract.mechanisms import (
    CHANNELS,
    COUNT,
    DEFAULTS,
    OPTIONS,
    Case,
    arguments_of_op,
    at,
    both,
    cases,
    cast,
    leaves,
    rows,
    tensors,
    tolerance_of,
)
from tests.common.inputs import padding
from tests.compare import assert_all_close, assert_close, gradients

#: Document lengths in each row of 24 tokens: 1, a chunk minus or plus one, and more than two chunks.
LENGTHS = ((1, COUNT - 1, COUNT, COUNT + 1, 8), (2 * COUNT + 2, 1, 11))
TOKENS = 24


def packs(case) -> bool:
    """Whether a case supports packed documents: it is a sequence, and the mechanism accepts them."""
    return case.kind.packs_documents() and not case.image


def ids_of(lengths=LENGTHS) -> Tensor:
    """segment_ids (B, n), in which some numbers are skipped."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)) * 2 + 3, torch.tensor(row)) for row in lengths])


def documents_of(ids: Tensor, mask: Tensor | None) -> list[tuple[int, Tensor]]:
    """The row and the real tokens of each document in turn."""
    documents = []
    for b in range(len(ids)):
        for number in ids[b].unique():
            real_tokens = [t for t in range(ids.shape[1]) if ids[b, t] == number and (mask is None or not mask[b, t])]
            if real_tokens:
                documents.append((b, torch.tensor(real_tokens)))
    return documents


def literally(module, inputs, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The reference applied to each document alone and written to its positions; 0 at padding."""
    out = torch.zeros(*inputs["v"].shape[:3], module.projections(CHANNELS)["v"], dtype=torch.float64)
    for b, tokens in documents_of(ids, mask):
        document = at(rows(inputs, slice(b, b + 1)), tokens)
        out = _put(out, b, tokens, module.reference(**document)[0])
    return out


def _put(out: Tensor, b: int, tokens: Tensor, value: Tensor) -> Tensor:
    """``out`` with ``value`` (H, tokens, e) written to some tokens of a row."""
    row = out[b].index_copy(1, tokens, value)
    return torch.cat([out[:b], row[None], out[b + 1 :]])


packed = [case for case in DEFAULTS if packs(case)]
decoders = [case for case in packed if case.causal]


def test_every_registered_mechanism_of_one_sequence_takes_them():
    registered = {name: kind for name, kind in ATTENTIONS.items() if kind.__module__.startswith("common.")}
    without = {name for name, kind in registered.items() if not kind.packs_documents()}
    assert without == {"soft", "flow_source"}, "one of images alone, and one of a source"


@cases(packed)
def test_documents_are_as_rows_of_their_own(case):
    for side in ("none", "holes"):
        assert_documents_stand_alone(case, side)


def assert_documents_stand_alone(case: Case, side: str) -> None:
    """Outputs and gradients are those of each document in a row of its own."""
    module, ids, mask = case.build(), ids_of(), padding(side, 2, TOKENS)
    inputs = tensors(module, TOKENS)
    out, expected = module(**inputs, **both(mask), segment_ids=ids), literally(module, inputs, ids, mask)
    assert_close("out", out, expected)
    names = leaves(inputs, module)
    assert_all_close(names, gradients(out, names.values()), gradients(expected, names.values()))


@cases(case for case in OPTIONS if packs(case))
def test_so_they_are_with_every_option(case):
    module, ids = case.build(), ids_of()
    inputs = tensors(module, TOKENS, grad=False)
    with torch.no_grad():
        assert_close("out", module(**inputs, segment_ids=ids), literally(module, inputs, ids))


@cases(packed)
@torch.no_grad()
def test_padding_may_stand_anywhere_and_have_any_id(case):
    module = case.build()
    inputs = tensors(module, TOKENS)
    for side in ("left", "all"):
        ids, mask = ids_of(), padding(side, 2, TOKENS)
        expected = literally(module, inputs, ids, mask)
        ids = ids.masked_fill(mask, -7)  # values at padding are ignored
        assert_close("out", module(**inputs, **both(mask), segment_ids=ids), expected)


@cases(packed)
@torch.no_grad()
def test_masks_of_keys_and_of_queries_are_two_things(case):
    """Each document has those of its own row; queries that are padding may be real keys."""
    module, ids, keys = case.build(), ids_of(), padding("left", 2, TOKENS)
    inputs, queries = tensors(module, TOKENS), keys | padding("right", 2, TOKENS)
    out = module(**inputs, key_padding_mask=keys, query_padding_mask=queries, segment_ids=ids)
    for b, tokens in documents_of(ids, None):
        row = slice(b, b + 1)
        masks = {"key_padding_mask": keys[row, tokens], "query_padding_mask": queries[row, tokens]}
        assert_close("out", out[row, :, tokens], module(**at(rows(inputs, row), tokens), **masks))


@cases(packed)
def test_another_document_changes_nothing_and_gets_no_gradient(case):
    module, ids = case.build(), ids_of()
    inputs = tensors(module, TOKENS)
    changed = cast(inputs, torch.float64)
    own = ids == 5  # one document of each row
    for name, x in changed.items():
        if isinstance(x, Tensor):
            noise = torch.where(own if name == "x" else own[:, None], 0.0, 1.0).unsqueeze(-1)
            changed[name] = (x.detach() + noise).requires_grad_()
    out, other = (module(**arguments, segment_ids=ids) for arguments in (inputs, changed))
    select = own[:, None, :, None].expand_as(out)
    assert torch.equal(out[select], other[select])
    leaf_tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    for grad in torch.autograd.grad(out[select].sum(), leaf_tensors, allow_unused=True, materialize_grads=True):
        outside = ~own if grad.dim() == 3 else ~own[:, None].expand(grad.shape[:3])
        assert not grad[outside].any()


@cases(packed)
def test_arguments_of_other_numbers_of_tokens_are_refused(case, monkeypatch):
    """Each argument of the op, with one token too few and one too many."""
    module, op = case.build(), case.kind.op
    call = {**tensors(module, TOKENS, grad=False), **both(padding("right", 2, TOKENS))}
    arguments = {**arguments_of_op(case, module, monkeypatch, **call), "segment_ids": ids_of()}
    op(**arguments)
    sizes = [(name, x, x.shape.index(TOKENS)) for name, x in arguments.items() if TOKENS in getattr(x, "shape", ())]
    assert len(sizes) >= 4, "values, both masks and segment_ids at least"
    for name, x, dim in sizes:
        for other in (x.narrow(dim, 0, TOKENS - 1), torch.cat([x, x.narrow(dim, TOKENS - 1, 1)], dim)):
            with pytest.raises(ValueError, match="allowed"):
                op(**{**arguments, name: other})


@cases(packed)
def test_half_precision(case):
    module, ids, dtype = case.build(), ids_of(), torch.bfloat16
    inputs = tensors(module, TOKENS, dtype=dtype, grad=False)
    expected = literally(module, cast(inputs, torch.float64), ids)
    out = case.build(dtype)(**inputs, segment_ids=ids)
    assert out.dtype == dtype
    assert_close("out", out, expected, 2 * tolerance_of(module, dtype))


@cases(decoders)
@pytest.mark.parametrize(
    "parts, side", [([1] * TOKENS, "none"), ([5, 1, 1, 14, 3], "all")], ids=["steps", "parts with padding"]
)
def test_extend_is_forward(parts, side, case):
    module, ids, mask = case.build(), ids_of(), padding(side, 2, TOKENS)
    inputs = tensors(module, TOKENS)
    outs, begin, state = [], 0, None
    for length in parts:
        part = slice(begin, begin + length)
        hidden = None if mask is None else mask[:, part]
        out, state = module.extend(**at(inputs, part), padding_mask=hidden, state=state, segment_ids=ids[:, part])
        assert all(len(tensor) == 2 for tensor in state.values()), "the batch is dimension 0"
        outs.append(out)
        begin += length
    out, whole = torch.cat(outs, dim=2), module(**inputs, **both(mask), segment_ids=ids)
    assert_close("out", out, whole)
    if side == "all":
        names = leaves(inputs, module)
        assert_all_close(names, gradients(out, names.values()), gradients(whole, names.values()))


@cases(decoders)
def test_a_beam_is_reordered_by_one_index_select(case):
    module, ids, order = case.build(), ids_of(), torch.tensor([1, 0, 1])
    inputs = tensors(module, TOKENS)
    _, state = module.extend(**at(inputs, slice(0, 13)), segment_ids=ids[:, :13])
    state = {name: tensor.index_select(0, order) for name, tensor in state.items()}
    second = rows(at(inputs, slice(13, None)), order)
    out, _ = module.extend(**second, state=state, segment_ids=ids[order, 13:])
    assert_close("out", out, module(**inputs, segment_ids=ids)[order, :, 13:])


@cases(case for case in packed if case.name in ("softmax", "flow", "mixed_chunk"))
def test_one_document_in_each_row_is_plain_attention(case):
    module = case.build()
    inputs = tensors(module, 13)
    ids = torch.tensor([[4] * 13, [7] * 13])
    assert torch.equal(module(**inputs, segment_ids=ids), module(**inputs))
