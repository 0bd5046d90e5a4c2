"""Packed documents in the functions of ``common.ops``: refused arguments, biases and tensors without heads."""

import pytest
import torch

from common.attention import build_attention
from common.ops import (
    daft_select,
    flow_attention,
    gau_attention,
    linear_attention,
    local_attention,
    row_attention,
    softmax_attention,
)
from tests.common.inputs import BIASES, bias_like, qkv
from tests.compare import assert_close
from tests.torch_versions import needs_newer_than_2_6

IDS = torch.tensor([[1] * 4 + [2] * 7, [0] * 1 + [5] * 10])
#: The documents of IDS: row, first and last token.
SPANS = ((0, 0, 4), (0, 4, 11), (1, 0, 1), (1, 1, 11))


def each(op, *tensors, **options):
    """Apply ``op`` to each document of IDS alone, and write the result to its position."""
    rows = [[], []]
    for row, begin, end in SPANS:
        rows[row].append(op(*(x[row : row + 1, ..., begin:end, :] for x in tensors), **options)[0])
    return torch.stack([torch.cat(row, dim=-2) for row in rows])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_ids_of_any_integers_from_any_number(dtype):
    q, k, v = qkv(11)
    out = linear_attention(q, k, v, causal=True, segment_ids=IDS.to(dtype))
    assert_close("out", out, each(linear_attention, q, k, v, causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", BIASES)
def test_a_bias_for_all_tokens_is_cut_for_each_document(form, causal):
    q, k, v = qkv(11)
    bias = bias_like(form, 11)

    def alone(*tensors):
        n = tensors[0].shape[2]
        of_vectors = form.startswith("vector")
        cut = bias if bias is None else bias[..., 11 - n : 10 + n] if of_vectors else bias[..., :n, :n]
        return gau_attention(*tensors, bias=cut, causal=causal)

    out = gau_attention(q, k, v, bias=bias, causal=causal, segment_ids=IDS)
    assert_close("out", out, each(alone, q, k, v))


@pytest.mark.parametrize("form", BIASES[1:])
def test_a_bias_for_other_tokens_is_refused(form):
    """A bias must not cover tokens of documents that have ended, which the state no longer holds."""
    q, k, v = qkv(11)
    for tokens in (10, 12, 20):
        with pytest.raises(ValueError, match="^bias has shape.* = 11 and 2 heads"):
            gau_attention(q, k, v, bias=bias_like(form, tokens), causal=True, segment_ids=IDS)
    first, ids = [x[:1, :, :10] for x in (q, k, v)], torch.tensor([[1] * 7 + [2] * 3])
    _, state = gau_attention(*first, causal=True, segment_ids=ids, return_state=True)
    last, seen = {"causal": True, "segment_ids": ids[:, -1:], "initial_state": state}, state["k"].shape[2]
    gau_attention(*(x[:1, :, 10:] for x in (q, k, v)), bias=bias_like(form, seen + 1), **last)
    with pytest.raises(ValueError, match=f"^bias has shape.* = {seen + 1} and 2 heads"):
        gau_attention(*(x[:1, :, 10:] for x in (q, k, v)), bias=bias_like(form, 11), **last)


def test_a_bias_for_all_tokens_is_cut_where_documents_go_on():
    q, k, v = qkv(11)
    whole, matrix = bias_like("vectors", 11), {"causal": True}
    expected = gau_attention(q, k, v, bias=whole, segment_ids=IDS, **matrix)
    parts, state = [], None
    for begin, end in ((0, 3), (3, 6), (6, 11)):
        part, seen = (x[:, :, begin:end] for x in (q, k, v)), 0 if state is None else state["k"].shape[2]
        n = seen + end - begin
        out, state = gau_attention(
            *part,
            bias=whole[..., 11 - n : 10 + n],
            segment_ids=IDS[:, begin:end],
            initial_state=state,
            return_state=True,
            **matrix,
        )
        parts.append(out)
    assert_close("out", torch.cat(parts, dim=2), expected)


def test_functions_that_no_module_calls_by_themselves():
    q, k, v = qkv(11, d=4, e=4)
    out = row_attention(q, k, v, row_length=3, segment_ids=IDS)
    assert_close("rows", out, each(row_attention, q, k, v, row_length=3))
    keys, values = torch.randn(2, 11, 2, dtype=torch.float64), torch.randn(2, 11, 6, dtype=torch.float64)
    index, bias = torch.tensor([0, 2]), torch.tensor([0.5, 1.0], dtype=torch.float64)
    options = {"index": index, "bias": bias, "window": 3, "causal": True}
    out = daft_select(None, keys, values, **options, segment_ids=IDS)
    assert_close("selected", out, each(lambda k, v: daft_select(None, k, v, **options), keys, values))


def refused(ids, match, op=linear_attention, **options):
    q, k, v = qkv(11)
    with pytest.raises(ValueError, match=rf"(?s){match}.*allowed"):
        op(q, k, v, **{"causal": True, **options}, segment_ids=ids)


def test_ids_that_do_not_fit_are_refused():
    refused(IDS.float(), "^segment_ids has dtype torch.float32")
    refused(IDS.bool(), "^segment_ids has dtype torch.bool")
    refused(IDS[:, :5], r"^segment_ids has shape \(2, 5\)")
    refused(IDS[0], r"^segment_ids has shape \(11,\)")
    refused([[1]], "^segment_ids is a list")
    refused(IDS.flip(1), "^segment_ids has 1 after 2, in row 0 at token 7")
    refused(torch.where(IDS == 2, 2 - torch.arange(11) % 2, IDS), "^segment_ids has 1 after 2")


def test_what_has_no_documents_is_refused():
    q, _, _ = qkv(11)
    _, k, v = qkv(9)
    with pytest.raises(ValueError, match="(?s)^segment_ids is given with q.*allowed"):
        linear_attention(q, k, v, segment_ids=IDS)
    with pytest.raises(ValueError, match="(?s)^v has shape.*allowed"):  # as without documents
        linear_attention(k, k, v[:, :, :5], segment_ids=IDS[:, :9], causal=True)
    mask = torch.zeros(2, 11, dtype=torch.bool)
    refused(IDS, "^one padding mask is given alone", flow_attention, causal=False, key_padding_mask=mask)
    images = build_attention("soft", num_heads=2, head_dim=4, spatial_dims=2)
    q = torch.randn(2, 2, 9, 4)
    with pytest.raises(ValueError, match="(?s)^segment_ids is given.*allowed"):
        images(q, None, q, spatial_shape=(3, 3), segment_ids=IDS[:, :9])
    source = build_attention("flow_source")
    with pytest.raises(ValueError, match="(?s)^segment_ids is given.*allowed"):
        source(q, q, q, source_q=q, segment_ids=IDS[:, :9])


@pytest.mark.parametrize(
    "op", [linear_attention, softmax_attention, lambda *x, **y: local_attention(*x, window=3, **y)]
)
def test_states_that_do_not_fit_are_refused(op):
    q, k, v = qkv(11)
    _, packed = op(q, k, v, causal=True, segment_ids=IDS, return_state=True)
    _, plain = op(q, k, v, causal=True, return_state=True)
    assert packed["segment_id"].tolist() == [2, 5]
    with pytest.raises(ValueError, match="(?s)^initial_state holds.*allowed.*segment_id"):
        op(q, k, v, causal=True, segment_ids=IDS + 9, initial_state=plain)
    with pytest.raises(ValueError, match="(?s)segment_id.*allowed"):
        op(q, k, v, causal=True, initial_state=packed)
    with pytest.raises(ValueError, match="(?s)^segment_ids has 1 after 2.*allowed"):
        op(q, k, v, causal=True, segment_ids=IDS, initial_state=packed)
    halved = {name: x[:1] for name, x in packed.items()}
    with pytest.raises(ValueError, match="(?s)initial_state.*allowed"):
        op(q, k, v, causal=True, segment_ids=IDS + 9, initial_state=halved)
    with pytest.raises(ValueError, match="(?s)causal=False.*allowed"):
        op(q, k, v, segment_ids=IDS, return_state=True)


@needs_newer_than_2_6
def test_torch_compile_breaks_its_graph_and_export_is_refused():
    module = build_attention("linear", causal=True).eval()
    q, k, v = (x.detach() for x in qkv(11))
    compiled = torch.compile(module, backend="eager")
    assert_close("out", compiled(q, k, v, segment_ids=IDS), module(q, k, v, segment_ids=IDS))
    with pytest.raises(Exception, match="segment_ids is given"):
        torch.export.export(module, (q, k, v), {"segment_ids": IDS})


def test_gradients_of_second_order():
    q, k, v = (x.detach().requires_grad_() for x in qkv(11))
    double = torch.autograd.gradgradcheck(
        lambda q, k, v: linear_attention(q, k, v, causal=True, segment_ids=IDS), (q, k, v)
    )
    assert double
