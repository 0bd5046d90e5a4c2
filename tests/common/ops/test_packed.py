"""Packed documents in the functions of ``common.ops``: biases, tensors without heads, and what is refused."""

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


def cut(bias, tokens: int, fewer: int):
    """The part of a bias for the first of some tokens."""
    if bias is None or bias.shape[-1] == tokens:
        return bias if bias is None else bias[..., :fewer, :fewer]
    return bias[..., tokens - fewer : tokens + fewer - 1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", BIASES)
def test_a_bias_for_all_tokens_is_cut_for_each_document(form, causal):
    """Also where documents go on: it is for the tokens of the call and of the state, which drops what has ended."""
    (q, k, v), bias = qkv(11), bias_like(form, 11)

    def alone(*tensors):
        return gau_attention(*tensors, bias=cut(bias, 11, tensors[0].shape[2]), causal=causal)

    expected = each(alone, q, k, v)
    assert_close("out", gau_attention(q, k, v, bias=bias, causal=causal, segment_ids=IDS), expected)
    parts, state = [], None
    for begin, end in ((0, 3), (3, 6), (6, 11)) if causal else ():
        seen = (0 if state is None else state["k"].shape[2]) + end - begin
        part, ids = (x[:, :, begin:end] for x in (q, k, v)), IDS[:, begin:end]
        options = {"bias": cut(bias, 11, seen), "segment_ids": ids, "initial_state": state, "return_state": True}
        out, state = gau_attention(*part, causal=True, **options)
        parts.append(out)
    if causal:
        assert_close("in parts", torch.cat(parts, dim=2), expected)


def test_functions_that_no_module_calls_by_themselves_and_ids_of_any_integers():
    q, k, v = qkv(11, d=4, e=4)
    out = row_attention(q, k, v, row_length=3, segment_ids=IDS)
    assert_close("rows", out, each(row_attention, q, k, v, row_length=3))
    keys, values = torch.randn(2, 11, 2, dtype=torch.float64), torch.randn(2, 11, 6, dtype=torch.float64)
    index, bias = torch.tensor([0, 2]), torch.tensor([0.5, 1.0], dtype=torch.float64)
    options = {"index": index, "bias": bias, "window": 3, "causal": True}
    out = daft_select(None, keys, values, **options, segment_ids=IDS)
    assert_close("selected", out, each(lambda k, v: daft_select(None, k, v, **options), keys, values))
    for dtype in (torch.int32, torch.uint8):
        out = linear_attention(q, k, v, causal=True, segment_ids=IDS.to(dtype))
        assert_close("out", out, each(linear_attention, q, k, v, causal=True))
    few, ids = qkv(5, batch=1, heads=1, d=2, e=2), torch.tensor([[1, 1, 2, 2, 2]])
    assert torch.autograd.gradgradcheck(lambda *x: linear_attention(*x, causal=True, segment_ids=ids), few)


#: What is given -> the beginning of the message.
WRONG_IDS = {
    "floats": (IDS.float(), "segment_ids has dtype torch.float32"),
    "bools": (IDS.bool(), "segment_ids has dtype torch.bool"),
    "fewer tokens": (IDS[:, :5], r"segment_ids has shape \(2, 5\)"),
    "no batch": (IDS[0], r"segment_ids has shape \(11,\)"),
    "a list": ([[1]], "segment_ids is a list"),
    "decreasing": (IDS.flip(1), "segment_ids has 1 after 2, in row 0 at token 7"),
    "a document in two parts": (torch.where(IDS == 2, 2 - torch.arange(11) % 2, IDS), "segment_ids has 1 after 2"),
}


@pytest.mark.parametrize("what", WRONG_IDS)
def test_ids_that_do_not_fit_are_refused(what):
    ids, message = WRONG_IDS[what]
    with pytest.raises(ValueError, match=f"(?s)^{message}.*allowed"):
        linear_attention(*qkv(11), causal=True, segment_ids=ids)


def test_what_has_no_documents_is_refused():
    q, k, v = qkv(11)
    mask, image = torch.zeros(2, 11, dtype=torch.bool), torch.randn(2, 2, 9, 4)
    images, source = build_attention("soft", num_heads=2, head_dim=4, spatial_dims=2), build_attention("flow_source")
    calls = {
        "segment_ids is given with q": lambda: linear_attention(q, k[:, :, :9], v[:, :, :9], segment_ids=IDS),
        "v has shape": lambda: linear_attention(
            q, k, v[:, :, :5], segment_ids=IDS, causal=True
        ),  # as without documents
        "one padding mask is given alone": lambda: flow_attention(q, k, v, key_padding_mask=mask, segment_ids=IDS),
        "segment_ids is given; ": lambda: images(image, None, image, spatial_shape=(3, 3), segment_ids=IDS[:, :9]),
        "segment_ids is given;": lambda: source(image, image, image, source_q=image, segment_ids=IDS[:, :9]),
        "bias has shape": lambda: gau_attention(q, k, v, bias=bias_like("vector", 12), causal=True, segment_ids=IDS),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"(?s)^{message}.*allowed"):
            call()


@pytest.mark.parametrize(
    "op", [linear_attention, softmax_attention, lambda *x, **y: local_attention(*x, window=3, **y)]
)
def test_states_that_do_not_fit_are_refused(op):
    tensors, options = qkv(11), {"causal": True, "return_state": True}
    _, packed = op(*tensors, **options, segment_ids=IDS)
    _, plain = op(*tensors, **options)
    assert packed["segment_id"].tolist() == [2, 5]
    for message, state, more in (
        ("^initial_state holds.*allowed.*segment_id", plain, {"segment_ids": IDS + 9}),
        ("segment_id.*allowed", packed, {}),
        ("^segment_ids has 1 after 2.*allowed", packed, {"segment_ids": IDS}),
        ("initial_state.*allowed", {name: x[:1] for name, x in packed.items()}, {"segment_ids": IDS + 9}),
        ("causal=False.*allowed", None, {"segment_ids": IDS, "causal": False}),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            op(*tensors, **{**options, **more}, initial_state=state)


@needs_newer_than_2_6
def test_torch_compile_breaks_its_graph_and_export_is_refused():
    module, tensors = build_attention("linear", causal=True).eval(), tuple(x.detach() for x in qkv(11))
    compiled = torch.compile(module, backend="eager")
    assert_close("out", compiled(*tensors, segment_ids=IDS), module(*tensors, segment_ids=IDS))
    with pytest.raises(Exception, match="segment_ids is given"):
        torch.export.export(module, tensors, {"segment_ids": IDS})
