"""Triton's kernels against literal references in float64, forward and in gradients."""

import math

import pytest
import torch

from common.ops.flow.options import ALLOCATIONS, COMPETITIONS, FORMS, FlowForm
from common.ops.flow.reference import CONSTANTS, Constants
from common.ops.mixed_chunk.gpu import kernels, sequence
from common.ops.shared.feature_maps import FEATURE_MAPS
from tests.common.inputs import FLOW_OPTIONS, name_of, padding
from tests.common.ops.gpu.kernels.rows import CHUNK, ROWS, SHORT, attend, doubled, draw, literally, of_all
from tests.compare import assert_close

names = pytest.mark.parametrize("name", ROWS)
chunks = pytest.mark.parametrize("name", ["chunks", "chunks both ways"])
ROUNDING = 1e-6  # relative to the largest gradient, the rounding error of one that is truly 0


def assert_agrees(name, tensors, mask=None, tolerance=None, **options) -> None:
    exact = doubled(tensors)
    out, expected = attend(name, tensors, mask, **options), literally(name, exact, mask, **options)
    assert out.dtype == tensors["v"].dtype
    assert_close("out", out.cpu(), expected.to(out.dtype), tolerance)
    assert_same_gradients(tensors, of_all(out, tensors), of_all(expected, exact), tolerance)


def assert_same_gradients(names, found, wanted, tolerance=None) -> None:
    largest = max(reference.double().norm() for reference in wanted)
    for name, actual, reference in zip(names, found, wanted, strict=True):
        if reference.norm() < ROUNDING * largest:
            assert actual.norm() < ROUNDING * largest, f"gradient of {name}"
        else:
            assert_close(f"gradient of {name}", actual, reference.to(actual.dtype), tolerance)


#: Each value of an option with each value of another one, in nine rows; and clamps where they matter.
PAIRS = [
    dict(zip(("form", "phi", "competition", "allocation"), values))
    for i, form in enumerate(FORMS)
    for j, phi in enumerate(FEATURE_MAPS)
    for values in [(form, phi, COMPETITIONS[(i + j) % 3], ALLOCATIONS[(i + 2 * j) % 3])]
]
CLAMPS = {"clamp": 5.0}, {"clamp": 0.9, "competition": "sigmoid"}, {"clamp": None, "form": "released_vision"}


@pytest.mark.parametrize("options", [*PAIRS, *CLAMPS], ids=name_of)
def test_every_option_of_flow_attention(options):
    # Unclamped relu flows reach 1e5; summing their exponentials as logarithms loses 1e-7 of that.
    assert_agrees("flow", draw("flow"), tolerance=1e-4 if options.get("phi") == "relu" else None, **options)


def test_constants_of_a_form_that_show_in_float32(monkeypatch):
    """1e-6 is as small as rounding relative to a flow; replacing it by 0.3 changes every output and gradient."""
    monkeypatch.setitem(FORMS, "coarse", FlowForm(eps=0.3, outer_eps=0.2, rescale=True))
    monkeypatch.setitem(CONSTANTS, "coarse", Constants(inner=0.3, outer=0.2, counts=True))
    # Without a clamp, which would zero most gradients, and with a partial last chunk.
    assert_agrees("flow", draw("flow", 25), padding("right", 1, 25), form="coarse", clamp=None)


@chunks
@pytest.mark.parametrize(
    "options, bias, heads",
    [
        ({"kernel": "laplace"}, "matrix", 1),
        ({}, "no bias", 1),
        ({"local": False}, "no bias", 1),
        ({"linear": False, "kernel": "laplace"}, "vectors", 2),
    ],
    ids=str,
)
def test_every_option_of_mixed_chunk_attention(options, bias, heads, name):
    """In chunks of two tiles, the second only partly full."""
    tensors = draw(name, 37 if heads == 1 else 23, heads=heads, bias=bias, chunk_size=20)
    assert_agrees(name, tensors, chunk_size=20, **options)


@names
@pytest.mark.parametrize("n, d, e", [(1, 5, 3), (2, 3, 17), (33, 17, 5), (None, 1, 1), (None, 5, 70), (None, 70, 4)])
def test_any_length_and_number_of_channels(n, d, e, name):
    """Several tiles at 33 tokens, and several blocks of values at 70."""
    options = {"chunk_size": 20} if n == 33 and name != "flow" else {}
    assert_agrees(name, draw(name, n, d, e, **options), **options)


@chunks
@pytest.mark.parametrize("n, chunk_size", [(3, 1), (17, 16), (17, 40)])
def test_any_chunk_size(n, chunk_size, name):
    assert_agrees(name, draw(name, n, chunk_size=chunk_size), chunk_size=chunk_size)


FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


@names
@pytest.mark.parametrize(
    "dtype, side, heads", [(FLOAT, "left", 2), (BFLOAT, "holes", 1), (HALF, "both", 1), (FLOAT, "all", 1)], ids=str
)
def test_dtypes_padding_heads_and_rows(dtype, side, heads, name):
    assert_agrees(name, draw(name, d=16, batch=2, heads=heads, dtype=dtype), padding(side, 2, SHORT[name]))


@chunks
@pytest.mark.parametrize("processors", [2, 3])
def test_sums_over_chunks_however_programs_share_them(processors, name, monkeypatch):
    """One head of two sequences is enough work for a GPU of two multiprocessors, but not of three."""
    monkeypatch.setattr(sequence, "processors", lambda device: processors)
    assert_agrees(name, draw(name, 13, batch=2), padding("left", 2, 13))


@chunks
def test_a_bias_by_distance_has_its_gradient_without_gather_too(name, monkeypatch):
    """Triton 3.2 has no gather."""
    monkeypatch.setattr(kernels, "HAS_GATHER", False)
    assert_agrees(name, draw(name, 25, chunk_size=20), chunk_size=20)


@names
def test_what_stands_in_padding_never_leaks_and_nan_in_a_real_token_is_not_hidden(name):
    mask, clean = padding("both", 2, SHORT[name]), draw(name, batch=2)
    hidden = mask.to(clean["v"].device)[:, None, :, None]
    poisoned = {x: (y.detach().masked_fill(hidden, math.nan) if y.dim() == 4 else y.detach()) for x, y in clean.items()}
    poisoned = {x: y.requires_grad_() for x, y in poisoned.items()}
    out, expected = attend(name, poisoned, mask), attend(name, clean, mask)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, of_all(out, poisoned), of_all(expected, clean)))
    loud = {x: (y[:1] if y.dim() == 4 else y).detach().clone() for x, y in clean.items()}
    loud["k" if name == "flow" else "k_quad"][:, :, -2, 1] = math.nan
    out = attend(name, loud)
    assert torch.isnan(out[:, :, -2:]).all()
    assert name == "flow" or torch.isfinite(out[:, :, :CHUNK]).all(), "another chunk"


@pytest.mark.parametrize("phi, sign", [("elu+1", 1.0), ("relu", 1.0), ("sigmoid", -1.0)])
def test_extreme_features_stay_finite(phi, sign):
    tensors = draw("flow")
    tensors = {x: y.detach().mul(100.0).abs().mul(sign).requires_grad_() for x, y in tensors.items()}
    out = attend("flow", tensors, phi=phi)
    assert all(torch.isfinite(x).all() for x in (out, *of_all(out, tensors)))


LAYOUTS = {
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a part": lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@names
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_inputs_and_gradients(layout, name):
    change, tensors = LAYOUTS[layout], draw(name, heads=2)
    exact, found = doubled(tensors), []
    for attention, leaves in ((attend, tensors), (literally, exact)):
        out = attention(name, {x: change(y) if y.dim() == 4 else y for x, y in leaves.items()})
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        found.append([out, *torch.autograd.grad((out * change(weights)).sum(), list(leaves.values()))])
    for actual, expected in zip(*found):
        assert_close("out or gradient", actual.cpu(), expected.float())


@names
def test_a_gradient_of_one_input_alone(name):
    tensors = draw(name)
    every = dict(zip(tensors, of_all(attend(name, tensors), tensors)))
    for x in every if name == "flow" else ("q_quad", "v", "bias"):
        alone = {other: y if other == x else y.detach() for other, y in tensors.items()}
        assert torch.equal(of_all(attend(name, alone), {x: tensors[x]})[0], every[x]), x


@names
def test_gradients_of_second_order_are_those_of_plain_pytorch(name, with_pytorch):
    """float64, which kernels do not support, is plain PyTorch."""

    def second_order(tensors):
        options = {"clamp": 20.0} if name == "flow" else {"chunk_size": 5}
        out = attend(name, tensors, padding("left", 1, 13), **options)
        first = torch.autograd.grad(out.square().sum(), list(tensors.values()), create_graph=True)
        return [x.cpu() for x in torch.autograd.grad(sum(x.sin().sum() for x in first), list(tensors.values()))]

    tensors = draw(name, 13, chunk_size=5)
    exact = {x: y.detach().double().requires_grad_() for x, y in tensors.items()}
    assert_same_gradients(tensors, second_order(tensors), second_order(exact), 1e-4)


@pytest.mark.parametrize("side, options", [("none", {}), ("holes", FLOW_OPTIONS[-3]), ("left", FLOW_OPTIONS[-1])])
def test_a_sequence_in_pieces_is_the_same_function(side, options):
    """Outputs, and gradients through the states between pieces, whose sums are float32."""
    rows = 1 if side == "none" else 2
    tensors, mask = draw("flow", 22, batch=rows), padding(side, rows, 22)
    outputs, state = [], None
    for piece in (slice(0, 1), slice(1, 19), slice(19, 22)):
        part, hidden = {x: y[:, :, piece] for x, y in tensors.items()}, None if mask is None else mask[:, piece]
        out, state = attend("flow", part, hidden, initial_state=state, return_state=True, **options)
        outputs.append(out)
    assert {x: y.dtype for x, y in state.items() if y.dtype != torch.float32} == {"count": torch.int64}
    exact = doubled(tensors)
    out, expected = torch.cat(outputs, 2), literally("flow", exact, mask, **options)
    assert_close("out", out.cpu(), expected.float())
    assert_same_gradients(tensors, of_all(out, tensors), of_all(expected, exact))


@pytest.mark.parametrize("options", [{}, {"allocation": "softmax", "clamp": None}], ids=name_of)
def test_the_state_and_all_its_gradients_are_those_of_plain_pytorch(options, with_pytorch):
    results = []
    for convert in (lambda x: x, lambda x: x.double()):
        first, second = ({x: convert(y.detach()) for x, y in draw("flow", n).items()} for n in (40, 39))
        with torch.no_grad():
            _, state = attend("flow", first, return_state=True, **options)
        state = {x: y.requires_grad_(x != "count") for x, y in state.items()}
        second = {x: y.requires_grad_() for x, y in second.items()}
        out, after = attend("flow", second, initial_state=state, return_state=True, **options)
        sums = [x for x in state if x != "count"]
        leaves = {**second, **{x: state[x] for x in sums}}
        loss = out.square().sum() + sum((after[x] * 0.1).sum() for x in sums)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        results.append({**{x: after[x] for x in sums}, **{f"gradient of {x}": y for x, y in zip(leaves, grads)}})
    for x, actual in results[0].items():
        # Gradients of the sums cancel to a tenth of their terms.
        tolerance = 5e-5 if x.startswith("gradient") else None
        assert_close(x, actual.detach().cpu(), results[1][x].detach().cpu().to(actual.dtype), tolerance)


@pytest.mark.parametrize("options", [{"kernel": "softmax"}, {"first_softmax": True}, {"first_to_all": True}], ids=str)
def test_what_kernels_do_not_take_is_left_to_plain_pytorch(options, with_pytorch, launches):
    tensors = draw("chunks both ways", 9)
    out = attend("chunks both ways", tensors, **options)
    assert_close("out", out.cpu(), literally("chunks both ways", doubled(tensors), **options).float())
    assert not launches


class Broken:
    """A kernel that fails on every device."""

    def __getitem__(self, grid):
        raise RuntimeError("no configuration fits this device")


@names
def test_a_backward_kernel_that_fails_gives_way_to_plain_pytorch(name, with_pytorch, monkeypatch):
    from common.ops.flow.gpu import chunks_kernels

    tensors = draw(name)
    wanted = of_all(attend(name, tensors), tensors)
    module, kernel = (chunks_kernels, "values_backward") if name == "flow" else (kernels, "gradients")
    monkeypatch.setattr(module, kernel, Broken())
    out = attend(name, tensors)
    with pytest.warns(UserWarning, match="no configuration fits.*LINEARTIME_TRITON=0"):
        found = of_all(out, tensors)
    assert_same_gradients(tensors, found, wanted, 1e-5)


# --- bounds of half precision ----------------------------------------------------------------------------------------

#: Largest relative rounding error of a dtype, and half its smallest number.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 0.0, torch.float16: 2.0**-25}


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize(
    "name, options, scale, values, roundings",
    [
        ("flow", {}, 1.0, 1.0, 4),
        ("flow", {"phi": "elu+1"}, 300.0, 1.0, 4),
        ("chunks", {}, 1.0, 1.0, 2),
        ("chunks", {}, 0.02, 1.0, 2),
        ("chunks", {}, 30.0, 1e-3, 2),
    ],
)
def test_errors_are_within_the_bounds_of_the_readme(name, options, scale, values, roundings, dtype):
    """In float16, large products overflow and small ones vanish unless they are scaled.

    Element by element, at most so many roundings of the sum of the terms' magnitudes, which the same function gives for
    absolute numbers; 5 % for products of rounded numbers, sums in float32, and flows, which have float32 operands.
    """
    options, n = (options, 20) if name == "flow" else ({**options, "chunk_size": 20}, 37)
    tensors = draw(name, n, 16, 5, dtype=dtype, bias="no bias")
    tensors = {x: (y.detach() * (values if x == "v" else scale)).requires_grad_() for x, y in tensors.items()}
    exact, mask = doubled(tensors), padding("left", 1, n)
    positive = ("v", "q_lin", "k_lin")
    magnitudes = {x: y.detach().abs().requires_grad_() if x in positive else y for x, y in exact.items()}
    out, expected, sizes = (
        attend(name, tensors, mask, **options),
        literally(name, exact, mask, **options),
        literally(name, magnitudes, mask, **options),
    )
    weights = torch.linspace(-values, values, out.numel()).view(out.shape).to(dtype)
    found = {"out": (out, expected, sizes)}
    found["gradient of v"] = tuple(
        torch.autograd.grad(x, y, z.to(x))[0]
        for x, y, z in (
            (out, tensors["v"], weights),
            (expected, exact["v"], weights),
            (sizes, magnitudes["v"], weights.abs()),
        )
    )
    for what, (actual, wanted, size) in found.items():
        bound = 1.05 * roundings * UNIT[dtype] * size + SMALLEST[dtype]
        error = (actual.cpu().double() - wanted).abs()
        assert (error <= bound).all(), f"{what}: {(error / bound).max():.3g} of the bound"


def test_what_is_saved_for_the_backward_pass_is_inputs_output_and_little_more():
    """Three flows and three weights of n numbers and, before each of 16 chunks and after the last, four sums of d."""
    tensors, saved = draw("flow", 256, 16, 16), {}

    def remember(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        attend("flow", tensors)
    size = sum(storage.nbytes() for storage in saved.values())
    assert size <= 4 * (4 * 256 * 16 + 6 * 256 + 4 * 17 * 16)
