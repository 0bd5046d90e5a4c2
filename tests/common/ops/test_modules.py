"""Modules of single mechanisms, beyond the contract: random buffers, parts, initial parameters, packed documents."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from common.attention import build_attention, only_part
from common.ops import daft_select, gau_attention, linear_attention, row_attention
from common.ops.bigbird import draw_numbers
from tests.common.inputs import BIASES, bias_like, qkv
from tests.compare import assert_all_close, assert_close, gradients
from tests.torch_versions import needs_newer_than_2_6

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

FLOAT = {"d": 4, "dtype": torch.float32}


# --- what is drawn at random -----------------------------------------------------------------------------------------


def test_training_draws_directions_of_favor_again_every_so_many_passes():
    """Evaluation keeps its directions, so that averaged weights share one set of directions."""
    module = build_attention("favor", head_dim=4, features=6, redraw=3).train()
    inputs, before = qkv(5, **FLOAT), module.directions.clone()
    trained = [module(*inputs) for _ in range(7)]
    assert [torch.equal(a, b) for a, b in zip(trained, trained[1:])] == [True, False, True, True, False, True]
    evaluated = module.eval()(*inputs)
    assert torch.equal(evaluated, trained[0]) and torch.equal(module.directions, before)


@pytest.mark.parametrize("use_reentrant, at_once", [(False, False), (True, False), (False, True)])
def test_passes_that_checkpointing_repeats_have_their_directions(use_reentrant, at_once):
    """With new directions in every pass, gradients equal those of the same passes without checkpointing.

    Also if all passes come before the backward pass, as in R-drop, which reentrant checkpointing does not support.
    """
    results = []
    for wrapped in (False, True):
        torch.manual_seed(2)
        module, inputs = build_attention("favor", head_dim=4, features=6, redraw=1).train(), qkv(5, **FLOAT)
        losses = []
        for _ in range(3):
            out = checkpoint(module, *inputs, use_reentrant=use_reentrant) if wrapped else module(*inputs)
            losses.append(out.square().sum())
            if not at_once:
                losses.pop().backward()
        if at_once:
            sum(losses).backward()
        results.append([x.grad for x in inputs])
    assert_all_close("qkv", *results[::-1])


@pytest.mark.parametrize(
    "name, options, buffer",
    [
        ("favor", {"features": 6}, "directions"),
        ("favor", {"features": 6, "redraw": 3}, "directions"),
        ("reformer", {"rounds": 2, "directions": 3, "chunk_size": 4}, "rotations"),
    ],
)
def test_it_is_drawn_again_on_request(name, options, buffer):
    """By a seed always the same, in training too; a state dict remembers it, and nothing else changes it."""
    module, (q, k, v) = build_attention(name, head_dim=4, **options), qkv(12, **FLOAT)
    k = None if name == "reformer" else k
    drawn, outputs = [getattr(module, buffer).clone()], []
    for seed in (None, 5, 5):
        getattr(module, f"redraw_{buffer}")(seed=seed)
        drawn.append(getattr(module, buffer).clone())
        outputs.append([module.train(training)(q, k, v) for training in (False, True)])
    assert [torch.equal(a, b) for a, b in zip(drawn, drawn[1:])] == [False, False, True]
    assert all(torch.equal(*pair) for pair in outputs[:2]) and not torch.equal(outputs[0][0], outputs[1][0])
    fresh = build_attention(name, head_dim=4, **options)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.eval()(q, k, v), module.eval()(q, k, v))


def test_training_draws_directions_of_rfa_and_evaluation_repeats():
    module, inputs = build_attention("rfa", num_heads=2, head_dim=4, features=6).double().train(), qkv(9, d=4)
    assert (module(*inputs) - module(*inputs)).abs().max() > 1e-3
    state = module.eval().source_state(*inputs[1:])
    assert torch.equal(module(*inputs), module(*inputs))
    (gradient,) = torch.autograd.grad(module(*inputs).square().sum(), [module.sigma])
    assert (gradient != 0).any(), "sigma learns"
    module.train()  # in training, the next call would have other directions than the state of a source
    for call in (lambda: module.source_state(*inputs[1:]), lambda: module.attend_source(inputs[0], state)):
        with pytest.raises(ValueError, match="^training is True; allowed"):
            call()


def test_each_bigbird_has_random_chunks_of_its_own_and_keeps_them():
    """In half precision, copies, state dicts and averages of them; version 0.2 stored the numbers themselves."""
    sizes = {"chunk_size": 2, "random_chunks": 2}
    first, second, inputs = build_attention("bigbird", **sizes), build_attention("bigbird", **sizes), qkv(40)
    out = first(*inputs)
    assert not torch.equal(second(*inputs), out)
    assert torch.equal(first.train()(*inputs), out) and torch.equal(first.half()(*inputs), out)
    second.load_state_dict({name: x.half() for name, x in first.state_dict().items()})
    assert torch.equal(second(*inputs), out) and torch.equal(copy.deepcopy(second)(*inputs), out)
    with pytest.warns(UserWarning, match="do not say"):
        first.load_state_dict({"numbers": draw_numbers(2)})
    averaged = {name: x.clone().mul_(0.9999).add_(x, alpha=1 - 0.9999) for name, x in first.state_dict().items()}
    second.load_state_dict(averaged)
    assert torch.equal(second(*inputs), first(*inputs)) and not torch.equal(first(*inputs), out)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="numbers"):
        second.load_state_dict({"numbers": draw_numbers(3)})


# --- parts and parameters --------------------------------------------------------------------------------------------


@causality
@pytest.mark.parametrize("part", ["window", "linear"])
@pytest.mark.parametrize("feature_map", ["softmax", "relu"])
def test_a_part_of_lolcats_alone_is_the_literal_one(part, feature_map, causal):
    """With padding on both sides, including gradients; afterwards the whole attention is restored."""
    module = build_attention("lolcats", causal, num_heads=2, head_dim=4, window=4, feature_map=feature_map).double()
    inputs, mask = qkv(17, d=4), torch.zeros(2, 17, dtype=torch.bool)
    mask[0, :3] = mask[1, 14:] = True
    whole = module(*inputs, mask, mask)
    with only_part(module, part):
        out, expected = module(*inputs, mask, mask), module.reference(*inputs, mask, mask)
    assert_close(part, out, expected)
    assert_all_close("qkv", gradients(out, inputs), gradients(expected, inputs))
    assert not torch.allclose(out, whole) and torch.equal(module(*inputs, mask, mask), whole)


def test_parameters_begin_as_papers_and_torch_have_them():
    """Hedgehog's maps are identities, T2R's as torch's layer, LoLCATs' window weighs what its option says."""
    q, k, v = (x.detach() for x in qkv(6, d=4))
    queries, keys = (torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1) for x in (q, k))
    scores, hedgehog = queries @ keys.mT, build_attention("hedgehog", num_heads=2, head_dim=4).double()
    assert_close("hedgehog", hedgehog(q, k, v), scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v)
    module, layer = build_attention("t2r", num_heads=3, head_dim=16, features=64), torch.nn.Linear(16, 3 * 64)
    for parameter, source in ((module.map_weight, layer.weight), (module.map_bias, layer.bias)):
        assert parameter.numel() == source.numel() and parameter.abs().max() <= 16**-0.5
        assert_close("spread", parameter.std(), source.std(), 0.1)
    for weight, options in ((0.1, {}), (0.5, {"window_weight": 0.5})):
        module = build_attention("lolcats", num_heads=2, head_dim=4, **options)
        assert_close("weight", module.window_gate.sigmoid(), torch.full((2,), weight))


def test_gla_has_narrow_keys_norms_that_are_reset_and_no_overflow_before_them():
    """Sums of 4,000 equal keys and values of 8 exceed float16's largest number, 65,504."""
    module = build_attention("gla", True, num_heads=2, head_dim=6)
    assert module.projections(6) == {"q": 3, "k": 3, "v": 6}
    assert build_attention("gla", True, num_heads=2, head_dim=6, key_channels=5).projections(6)["k"] == 5
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    with torch.no_grad():
        for x in module.parameters():
            x.fill_(7.0)
    module.reset_parameters()
    for name, x in module.named_parameters():
        assert torch.equal(x, before[name]) == ("norm" in name) and (x != 7.0).all(), name
    module = build_attention("gla", True, num_heads=1, head_dim=4, output_norm="rms", output_gate="none")
    with torch.no_grad():
        module.gate_up_proj.bias.fill_(200.0)
    q, k, v, x = (torch.full((1, 1, 4000, c), 8.0).half() for c in (2, 2, 4, 4))
    assert (module.half()(q, k, v, x=x[0])[:, :, -1] - 1).abs().max() < 0.01


def test_an_output_norm_of_retention_leaves_nothing_of_the_normalisation_of_scores():
    """Only the norm's epsilon makes a difference, which large values hide."""
    q, k, v = (100 * x.detach() for x in qkv(30, d=4, e=4))
    for norm in ("rms", "group"):
        options = {"num_heads": 2, "head_dim": 4, "output_norm": norm, "output_gate": "none"}
        one, other = (build_attention("retention", True, score_norm=x, **options).double() for x in (True, False))
        assert "x" not in one.needs
        assert_close("out", one(q, k, v), other(q, k, v), 1e-4)


def test_the_longest_length_of_cosformer_is_recorded():
    state = build_attention("cosformer", max_tokens=6).state_dict()
    with pytest.warns(UserWarning, match="max_tokens=6.*max_tokens=60"):
        build_attention("cosformer", max_tokens=60).load_state_dict(state)


# --- packed documents in functions that the contract does not call ----------------------------------------------------

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


@causality
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


@needs_newer_than_2_6
def test_torch_compile_breaks_its_graph_and_export_is_refused():
    module, tensors = build_attention("linear", causal=True).eval(), tuple(x.detach() for x in qkv(11))
    compiled = torch.compile(module, backend="eager")
    assert_close("out", compiled(*tensors, segment_ids=IDS), module(*tensors, segment_ids=IDS))
    with pytest.raises(Exception, match="segment_ids is given"):
        torch.export.export(module, tensors, {"segment_ids": IDS})
