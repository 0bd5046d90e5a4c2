"""Refusals of single functions, beyond what the contract tries: one row for each argument."""

import math
import pickle
from functools import partial

import pytest
import torch

from common.attention import build_attention, only_part
from common.ops import (
    daft_conv,
    daft_full,
    daft_select,
    flow_attention,
    flow_attention_map,
    flow_attention_weights,
    gated_delta_attention,
    gau_attention,
    hedgehog_attention,
    linear_attention,
    local_attention,
    lolcats_attention,
    mixed_chunk_attention,
    nystrom_attention,
    reformer_attention,
    retention_attention,
    rfa_attention,
    row_attention,
    soft_attention,
    softmax_attention,
)
from common.ops.reformer import draw_rotations
from common.ops.shared.checks import ArgumentError, check_positive_int, check_probability
from tests.common.refusals import refused, tensors


def mixed_chunk(q, k, v, chunk_size=4, **options):
    return mixed_chunk_attention(q, k, options.pop("q_lin", q), k, v, chunk_size=chunk_size, **options)


def weights(q, k, v, **options):
    return flow_attention_weights(q, k, **options)


def flow_map(q, k, v, **options):
    return flow_attention_map(q, k, **options)


def rfa(q, k, v, **options):
    return rfa_attention(q, k, v, torch.zeros(3, 6, 4), causal=True, **options)


def of_maps(op, **more):
    shapes = {"query_weight": (3, 6, 4), "query_bias": (3, 6), "key_weight": (3, 6, 4), "key_bias": (3, 6)}
    maps = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return lambda q, k, v, **options: op(q, k, v, **{**maps, **more, **options})


def soft(q, k, v, **options):
    ones = torch.ones(4)
    parameters = {"landmark_weight": torch.ones(4, 4, 2, 2), "norm_weight": ones, "norm_bias": ones}
    return soft_attention(q, v, **{"spatial_shape": (1, 5), **parameters, **options})


def module(name, **facts):
    """Builds a module."""
    return lambda q, k, v, **options: build_attention(name, **{"num_heads": 3, "head_dim": 4, **facts, **options})


def called(name, **facts):
    """Calls a module."""
    return lambda q, k, v, **given: build_attention(name, num_heads=3, head_dim=4, max_tokens=9, **facts)(
        q, k, v, **given
    )


HEDGEHOG, LOLCATS = of_maps(hedgehog_attention), of_maps(lolcats_attention, window=3, window_gate=torch.zeros(3))
row, causal_linear = partial(row_attention, row_length=4), partial(linear_attention, causal=True)
META, MASK = "meta", torch.zeros(2, 4, dtype=torch.bool)
IDS = torch.tensor([[1, 1, 2, 2, 2], [0, 5, 5, 5, 5]])
FEWER = {"key_weight": torch.zeros(3, 2, 4), "key_bias": torch.zeros(3, 2)}
#: (function, its changed arguments, the argument that is named, what was given, what is allowed); q, k and v have two
#: rows, three heads, five tokens and four channels.
WRONG = [
    *((f, {"form": "Paper"}, "form", "'Paper'", "'paper', 'released'") for f in (weights, flow_map)),
    (weights, {"phi": "softplus"}, "phi", "'softplus'", "'sigmoid', 'elu+1', 'relu'"),
    (weights, {"competition": "x"}, "competition", "'x'", "'softmax', 'sigmoid'"),
    (weights, {"allocation": None}, "allocation", "None", "'sigmoid', 'softmax'"),
    *((weights, {"clamp": given}, "clamp", repr(given), "a number above 0") for given in (0.0, math.nan)),
    *((weights, {x: torch.zeros(2, 5)}, x, "float32", "bool") for x in ("key_padding_mask", "query_padding_mask")),
    *((weights, {x: MASK}, x, "(2, 4)", "(2, 5)") for x in ("key_padding_mask", "query_padding_mask")),
    (weights, {"key_padding_mask": MASK.new_zeros(2, 5)}, "query_padding_mask", "None", "both or none"),
    (weights, {"query_padding_mask": MASK.new_zeros(2, 5)}, "key_padding_mask", "None", "both or none"),
    (flow_map, {"max_tokens": 4}, "q and k", "5 and 5 tokens", "max_tokens=4"),
    (flow_map, {"q": torch.zeros(5, 4)}, "q", "(5, 4)", "4 dimensions"),
    (retention_attention, {"score_norm": 1}, "score_norm", "1", "True or False"),
    (rfa, {"log_gate": torch.zeros(2, 3, 4)}, "log_gate", "(2, 3, 4)", "(2, 3, 5)"),
    (HEDGEHOG, FEWER, "query_weight", "(3, 6, 4) and key_weight (3, 2, 4)", "equally many"),
    (LOLCATS, {"window_gate": torch.zeros(2)}, "window_gate", "(2,)", "(3,)"),
    (gated_delta_attention, {"beta": torch.zeros(2, 3, 5, device=META)}, "beta", "meta", "cpu"),
    (row, {"k": torch.zeros(2, 3, 5, 6)}, "k", "(2, 3, 5, 6) and q (2, 3, 5, 4)", "channels"),
    (mixed_chunk, {"k": torch.zeros(2, 3, 5, 6)}, "k_quad", "(2, 3, 5, 6) and q_quad (2, 3, 5, 4)", "channels"),
    (row, {x: torch.zeros(2, 3, 7, 4) for x in "kv"}, "k", "7 tokens and q 5", "the same number"),
    (mixed_chunk, {x: torch.zeros(2, 3, 7, 4) for x in "kv"}, "k_quad", "7 tokens and q_quad 5", "the same number"),
    *((row, {"row_length": given}, "row_length", repr(given), "an integer of at least 1") for given in (0, 2.5)),
    *((gau_attention, {"divisor": given}, "divisor", repr(given), "above 0") for given in (0.0, -1.0, math.nan)),
    (gau_attention, {"causal": True, "first_softmax": True}, "first_softmax", "causal=True", "False"),
    (gau_attention, {"q": torch.zeros(2, 5, 4)}, "k", "(2, 3, 5, 4)", "3 dimensions, as q is"),
    (gau_attention, {"v": torch.zeros(2, 5, 4)}, "v", "(2, 5, 4)", "4 dimensions, as q is"),
    (gau_attention, {"q": torch.zeros(5, 4)}, "q", "(5, 4)", "(B, n, s) or (B, H, n, s)"),
    (mixed_chunk, {"q": [1.0], "q_lin": [1.0]}, "q_quad", "list", "(B, n, s) or (B, H, n, s)"),
    *(
        (f, {"kernel": "relu"}, "kernel", "'relu'", "'relu2', 'softmax', 'laplace'")
        for f in (gau_attention, mixed_chunk)
    ),
    *(
        (gau_attention, {"bias": torch.zeros(shape)}, "bias", str(shape), "the number of tokens = 5 and 3 heads: (9,)")
        for shape in ((), (8,), (4, 5), (2, 9), (3, 5, 4), (2, 3, 5, 5))
    ),
    (mixed_chunk, {"bias": torch.zeros(8)}, "bias", "(8,)", "chunk_size = 4 and 3 heads: (7,), (4, 4)"),
    (mixed_chunk, {"bias": torch.zeros(7), "overlap": True}, "bias", "(7,)", "with overlap: (15,)"),
    (gau_attention, {"bias": torch.zeros(9, dtype=torch.long)}, "bias", "int64", "floating point"),
    (gau_attention, {"bias": [0.0] * 9}, "bias", "list", "floating point"),
    (gau_attention, {"bias": torch.zeros(9, device=META)}, "bias", "meta", "cpu"),
    *(
        (mixed_chunk, {x: True, **more}, x, "True", "causal=False and local=True")
        for x in ("first_softmax", "first_to_all")
        for more in ({"causal": True}, {"local": False})
    ),
    (mixed_chunk, {"local": False, "linear": False}, "local and linear", "both False", "one of them"),
    (mixed_chunk, {"overlap": True, "local": False}, "overlap=True", "given", "without local=False"),
    (mixed_chunk, {"overlap": True, "first_softmax": True}, "overlap=True", "given", "without first_softmax"),
    (mixed_chunk, {"chunk_summaries": True, "return_state": True}, "initial_state and return_state", "", "causal=True"),
    *(
        (mixed_chunk, {"q_lin": wrong}, "q_lin", shown, "as q_quad, (2, 3, 5, 4), torch.float32, on cpu")
        for wrong, shown in (
            (torch.zeros(2, 3, 4, 4), "(2, 3, 4, 4)"),
            (torch.zeros(2, 3, 5, 3), "(2, 3, 5, 3)"),
            (torch.zeros(2, 3, 5, 4).double(), "torch.float64"),
            (torch.zeros(2, 3, 5, 4, device=META), "on meta"),
        )
    ),
    (nystrom_attention, {"iterations": 21}, "iterations", "21", "20"),
    (soft, {"iterations": 21}, "iterations", "21", "20"),
    (soft, {"norm_bias": torch.zeros(5)}, "q", "norm_bias is (5,)", "(4,)"),
    (module("nystrom"), {"conv_kernel": 4}, "conv_kernel", "4", "odd"),
    (module("soft", spatial_dims=2), {"conv_kernel": 2}, "conv_kernel", "2", "odd"),
    (module("soft"), {}, "spatial_dims", "1", "2 for images"),
    (module("soft", spatial_dims=2), {"causal": True}, "causal", "True", "False"),
    (module("lolcats"), {"window_weight": 1.0}, "window_weight", "1.0", "above 0 and below 1"),
    (module("retention", causal=True, head_dim=5), {}, "head_dim", "5", ""),
    (called("soft", spatial_dims=2), {"spatial_shape": (1, 5)}, "k", "", "None"),
    *(
        (causal_linear, {"segment_ids": given}, "segment_ids", shown, "")
        for given, shown in (
            *((IDS.float(), "torch.float32"), (IDS.bool(), "torch.bool"), (IDS[:, :3], "(2, 3)"), (IDS[0], "(5,)")),
            *(([[1]], "list"), (IDS.flip(1), "1 after 2"), (IDS + torch.tensor([0, 2, 0, 2, 0]), "after")),
        )
    ),
    (
        *(linear_attention, {**{x: torch.zeros(2, 3, 4, 4) for x in "kv"}, "segment_ids": IDS}),
        *("segment_ids", "given with q", ""),
    ),
    (flow_attention, {"key_padding_mask": IDS > 9, "segment_ids": IDS}, "one padding mask", "alone", ""),
    (called("soft", spatial_dims=2), {"k": None, "spatial_shape": (1, 5), "segment_ids": IDS}, "segment_ids", "", ""),
    (called("flow_source"), {"source_q": torch.zeros(2, 3, 5, 4), "segment_ids": IDS}, "segment_ids", "given", ""),
    (gau_attention, {"bias": torch.zeros(11), "causal": True, "segment_ids": IDS}, "bias", "(11,)", ""),
    (called("reformer"), {}, "k", "given", "None"),
    (called("synthesizer", form="dense"), {"q": None, "k": None}, "q", "", "form="),
    (called("synthesizer", form="dense"), {}, "k", "", "form="),
    (called("synthesizer", form="random"), {"k": None}, "q", "", "form="),
]


# --- DAFT, whose tensors have no heads -------------------------------------------------------------------------------


def daft(op, heads, **defaults):
    def call(**changes):
        inputs = {"q": torch.randn(2, 9, 4), "k": torch.randn(2, 9, heads), "v": torch.randn(2, 9, 4)}
        return op(**{**inputs, **defaults, **changes})

    return call


full, conv = daft(daft_full, 4, w=torch.zeros(9, 9)), daft(daft_conv, 2, r=torch.zeros(2, 5))
select = daft(daft_select, 2, index=torch.tensor([1, 4]), bias=torch.zeros(2), window=5)
SQUARE, THREE = {"r": torch.zeros(2, 3, 3)}, {"window": (3, 3)}
WRONG_OF_DAFT = [
    (select, {"q": torch.randn(2, 1, 9, 4)}, "q", "(2, 1, 9, 4)", "(B, tokens, channels)"),
    (conv, {"q": torch.randn(2, 8, 4)}, "q", "(2, 8, 4)", "(2, 9, 4)"),
    (select, {"k": [1.0]}, "k", "list", "a tensor"),
    (full, {"k": torch.randn(2, 9, 3)}, "k", "(2, 9, 3)", "(2, 9, "),
    (select, {"v": torch.ones(2, 9, 4, dtype=torch.long)}, "q", "torch.float32", "torch.int64"),
    (select, {name: torch.randn(2, 0, 4) for name in "qkv"}, "q", "(2, 0, 4)", "none empty"),
    (select, {"q": torch.randn(2, 9, 4, device=META)}, "q", "meta", "cpu"),
    (select, {"key_padding_mask": torch.zeros(2, 9)}, "key_padding_mask", "float32", "torch.bool"),
    (select, {"key_padding_mask": torch.zeros(2, 8).bool()}, "key_padding_mask", "(2, 8)", "(2, 9)"),
    (full, {"w": torch.zeros(9, 8)}, "w", "(9, 8)", "one (N, N), or two (N, n)"),
    (full, {"w": (torch.zeros(9, 3), torch.zeros(8, 3))}, "w", "(8, 3)", "two (N, n)"),
    (full, {"w": (torch.zeros(9, 3),) * 3}, "w", "tuple", "two (N, n)"),
    (full, {"w": torch.zeros(9, 9, dtype=torch.long)}, "w", "torch.int64", "floating point"),
    (full, {"w": (1.0, 2.0)}, "w", "float", "(N, N)"),
    (full, {"w": torch.zeros(8, 8)}, "the input", "9 tokens", "at most 8"),
    (full, {"w": (torch.zeros(7, 3),) * 2}, "the input", "9 tokens", "at most 7"),
    (conv, {"r": torch.zeros(5)}, "r", "(5,)", "(heads, window) or (heads, height, width)"),
    (conv, {"r": torch.zeros(2, 0)}, "r", "(2, 0)", "(heads, window)"),
    (conv, {"r": torch.zeros(2, 4)}, "r", "(4,)", "odd sizes"),
    (conv, {"r": torch.zeros(2, 3, 4), "spatial_shape": (3, 3)}, "r", "(3, 4)", "odd sizes"),
    (conv, {"r": torch.zeros(4, 5)}, "k", "(2, 9, 2)", "(2, 9, 4)"),
    (conv, {"r": torch.zeros(3, 5), "k": torch.zeros(2, 9, 3)}, "r", "3 heads", "a divisor of the channels, 4"),
    (select, {"index": torch.tensor([0, 5])}, "index", "[0, 5]", "0 to 4"),
    (select, {"index": torch.tensor([-1, 4])}, "index", "[-1, 4]", "0 to 4"),
    (select, {"index": torch.tensor([0.0, 1.0])}, "index", "torch.float32", "torch.int64"),
    (select, {"index": torch.tensor([0])}, "k", "(2, 9, 2)", "(2, 9, 1)"),
    (select, {"bias": torch.zeros(1)}, "bias", "(1,)", "(2,)"),
    (select, {"bias": torch.zeros(2, device=META)}, "bias", "meta", "cpu"),
    (select, {"window": 6}, "window", "(6,)", "odd sizes"),
    (select, {"window": 2.5}, "window", "2.5", "an integer of at least 1"),
    (select, {"window": (3, 3, 3)}, "window", "(3, 3, 3)", "two of them"),
    *(
        (call, {**window, "spatial_shape": shape}, "spatial_shape", str(shape), "(height, width)")
        for call, window, shape in ((conv, SQUARE, (2, 4)), (conv, SQUARE, None), (select, THREE, (9,)))
    ),
    (conv, {"spatial_shape": (3, 3)}, "spatial_shape", "(3, 3) with a window of (5,)", "None with a window of one"),
    (select, {**THREE, "spatial_shape": (3, 3), "causal": True}, "spatial_shape", "causal=True", "causal=False"),
    (conv, {"return_state": True}, "initial_state and return_state", "causal=False", "only with causal=True"),
]


@pytest.mark.parametrize("call, change, argument, given, allowed", [*WRONG, *WRONG_OF_DAFT])
def test_what_does_not_fit(call, change, argument, given, allowed):
    given_tensors = {} if call in (full, conv, select) else tensors()
    with refused(argument, given, allowed):
        call(**{**given_tensors, **change})


def test_what_does_fit():
    """Windows that are larger than an image, even ones of causal sequences, one number for all biases, long maps."""
    for call, window in ((conv, SQUARE), (select, THREE)):
        assert call(**window, spatial_shape=(1, 9)).shape == (2, 9, 4)
    assert conv(r=torch.zeros(2, 4), causal=True).shape == select(window=6, causal=True).shape == (2, 9, 4)
    for shape in ((1,), (1, 1), (3, 1), (3, 1, 1)):
        one = {name: x[:, :, :1] for name, x in tensors().items()}
        assert gau_attention(**one, bias=torch.zeros(shape)).shape == (2, 3, 1, 4)
    assert flow_map(**tensors(), max_tokens=5).shape == (2, 3, 5, 5)


# --- states, parts, and names that a host translates -----------------------------------------------------------------


def test_states_of_other_sizes():
    x, rotations = tensors(), draw_rotations(2, 4, 3)
    _, state = reformer_attention(x["q"], x["v"], rotations, causal=True, return_state=True)
    with refused("initial_state['codes']", "(2, 3, 5, 2)", "(2, 3, 5, 1)"):
        reformer_attention(x["q"], x["v"], rotations[:1], causal=True, initial_state=state)
    _, state = conv(causal=True, return_state=True)
    with refused("initial_state['k']", "5 of 9 tokens", "the last 6"):
        conv(r=torch.zeros(2, 6), causal=True, initial_state=state)
    for log_decay in (None, torch.zeros(2, 3, 5)):
        options = {"causal": True, "log_decay": log_decay}
        for wrong in ({}, {"sum_q": torch.zeros(2, 3, 4)}):
            with pytest.raises(ValueError, match="^initial_state .*allowed"):
                weights(**x, **options, initial_state=wrong)


@pytest.mark.parametrize("op", [linear_attention, softmax_attention, partial(local_attention, window=3)])
def test_states_of_packed_documents(op):
    x, options = tensors().values(), {"causal": True, "return_state": True}
    _, packed = op(*x, **options, segment_ids=IDS)
    _, plain = op(*x, **options)
    assert packed["segment_id"].tolist() == [2, 5]
    for message, state, more in (
        ("^initial_state holds.*allowed.*segment_id", plain, {"segment_ids": IDS + 9}),
        ("segment_id.*allowed", packed, {}),
        ("^segment_ids has 1 after 2.*allowed", packed, {"segment_ids": IDS}),
        ("initial_state.*allowed", {name: y[:1] for name, y in packed.items()}, {"segment_ids": IDS + 9}),
        ("causal=False.*allowed", None, {"segment_ids": IDS, "causal": False}),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            op(*x, **{**options, **more}, initial_state=state)


def test_parts_that_cannot_be():
    module = build_attention("lolcats", True, num_heads=3, head_dim=4)
    for message, call in (
        ("part is 'none'; allowed: 'both', 'window', 'linear'", only_part(module, "none")),
        ("model is a Linear without lolcats", only_part(torch.nn.Linear(2, 2), "linear")),
    ):
        with pytest.raises(ValueError, match=message), call:
            pass
    with only_part(module, "linear"), pytest.raises(ValueError, match="part is 'linear'; allowed .*: 'both'"):
        module.extend(**tensors())


def test_names_of_arguments_are_bare_or_as_typed():
    """Only marked names are replaced, not equal words next to them; every check of an option marks its argument."""
    error = ArgumentError("`heads` is 3; allowed: as many heads as divide `dim`, 8, without `gate=False`")
    assert str(error) == "heads is 3; allowed: as many heads as divide dim, 8, without gate=False"
    names = {"heads": "--heads", "gate=False": "--no-gate"}
    assert error.with_names(names) == "--heads is 3; allowed: as many heads as divide dim, 8, without --no-gate"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(ValueError, match="^chunk_size is 0; allowed: an integer of at least 1") as caught:
        check_positive_int("chunk_size", 0)
    assert caught.value.with_names({"chunk_size": "--chunk-size"}).startswith("--chunk-size is 0")
    for rate in (1.0, -0.1, math.nan, "0.1", None):
        with refused("rate", repr(rate), "at least 0 and below 1"):
            check_probability("rate", rate)
