"""Kernels of causal Flow-Attention against the literal reference in float64, forward and in gradients."""

import math

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow.gpu import chunks_kernels
from common.ops.flow.options import ALLOCATIONS, COMPETITIONS, FORMS, FlowForm
from common.ops.flow.reference import CONSTANTS, Constants, flow_attention_reference
from tests.common.inputs import FLOW_OPTIONS, SIDES, doubled, name_of, padding, qkv
from tests.common.ops.shared.gpu.device import on_cpu, on_device
from tests.compare import TOLERANCES, assert_close, gradients

SMALL = {"batch": 1, "heads": 1, "d": 5, "e": 3, "dtype": torch.float32}
ROUNDING = 1e-6  # relative to the largest gradient, the rounding error of one that is truly 0


def attend(inputs, mask=None, **options):
    (mask,) = on_device([mask])
    return flow_attention(*inputs, causal=True, key_padding_mask=mask, query_padding_mask=mask, **options)


def assert_agrees(inputs, mask=None, tolerance=None, **options) -> None:
    exact, inputs = doubled(*inputs), on_device(inputs)
    out = attend(inputs, mask, **options)
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    expected = flow_attention_reference(*exact, causal=True, **masks, **options)
    assert out.dtype == inputs[2].dtype
    assert_close("out", out.cpu(), expected.to(out.dtype), tolerance)
    assert_same_gradients(on_cpu(gradients(out.cpu(), inputs)), gradients(expected, exact), tolerance)


def assert_same_gradients(found, wanted, tolerance=None, names="qkv") -> None:
    largest = max(reference.norm() for reference in wanted)
    for name, actual, reference in zip(names, found, wanted):
        if reference.norm() < ROUNDING * largest:
            assert actual.norm() < ROUNDING * largest, f"gradient of {name}"
        else:
            assert_close(f"gradient of {name}", actual, reference.to(actual.dtype), tolerance)


@pytest.mark.parametrize("options", FLOW_OPTIONS, ids=name_of)
def test_every_option_agrees_with_the_reference(options):
    # Unclamped relu flows reach 1e5; summing their exponentials as logarithms loses 1e-7 of that.
    loose = options.get("phi") == "relu"
    assert_agrees(qkv(40, **SMALL), tolerance=1e-4 if loose else None, **options)


def test_constants_of_a_form_that_show_in_float32_agree(monkeypatch):
    """1e-6 is as small as rounding relative to a flow; replacing it by 0.3 changes every output and gradient."""
    monkeypatch.setitem(FORMS, "coarse", FlowForm(eps=0.3, outer_eps=0.2, rescale=True))
    monkeypatch.setitem(CONSTANTS, "coarse", Constants(inner=0.3, outer=0.2, counts=True))
    # Without a clamp, which would zero most gradients, and with a partial last chunk.
    assert_agrees(qkv(50, **SMALL), padding("right", 1, 50), form="coarse", clamp=None)


def test_the_options_tested_are_all_there_are():
    for name, allowed in (("form", FORMS), ("competition", COMPETITIONS), ("allocation", ALLOCATIONS)):
        defaults = {"form": "released", "competition": "softmax", "allocation": "sigmoid"}
        tested = {options.get(name, defaults[name]) for options in FLOW_OPTIONS}
        assert tested == set(allowed) - {"softmax_heads"}  # which is not causal


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_any_length_agrees(length):
    assert_agrees(qkv(length, **SMALL))


@pytest.mark.parametrize("d, e", [(1, 1), (3, 17), (16, 70), (33, 4), (70, 5)])
def test_any_number_of_channels_agrees(d, e):
    """Three blocks of values at e = 70, chunks of 16 at d = 70."""
    assert_agrees(qkv(70, **{**SMALL, "d": d, "e": e}), form="released_vision")


@pytest.mark.parametrize("side", SIDES[1:])
def test_padding_on_any_side_agrees(side):
    assert_agrees(qkv(40, **{**SMALL, "batch": 2}), padding(side, 2, 40), allocation="softmax")


def test_heads_and_rows_do_not_mix():
    assert_agrees(qkv(40, **{**SMALL, "batch": 2, "heads": 3, "d": 2}), padding("left", 2, 40), form="paper")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_agrees_with_the_float64_reference(dtype):
    assert_agrees(qkv(66, **{**SMALL, "batch": 2, "d": 16, "dtype": dtype}), padding("left", 2, 66))


def test_sums_of_half_inputs_are_float32():
    inputs = on_device(qkv(65, **{**SMALL, "dtype": torch.float16}))
    _, state = attend(inputs, return_state=True)
    assert {name: x.dtype for name, x in state.items() if x.dtype != torch.float32} == {"count": torch.int64}


@pytest.mark.parametrize("phi, sign", [("elu+1", 1.0), ("relu", 1.0), ("sigmoid", -1.0)])
def test_extreme_features_stay_finite(phi, sign):
    q, k, v = on_device(qkv(40, **{**SMALL, "scale": 100.0}))
    q, k = (x.detach().abs().mul(sign).requires_grad_() for x in (q, k))
    out = attend((q, k, v), phi=phi)
    assert all(torch.isfinite(x).all() for x in (out, *gradients(out.cpu(), (q, k, v))))


def test_what_stands_in_padding_never_leaks():
    mask = padding("both", 2, 40)
    clean = on_device(qkv(40, **{**SMALL, "batch": 2}))
    poisoned = on_device(x.masked_fill(mask.to(x.device)[:, None, :, None], math.nan) for x in clean)
    out, expected = attend(poisoned, mask), attend(clean, mask)
    assert torch.equal(out, expected)
    for name, actual, wanted in zip("qkv", gradients(out.cpu(), poisoned), gradients(expected.cpu(), clean)):
        assert torch.equal(actual, wanted), f"gradient of {name}"
        assert (actual.cpu().masked_select(mask[:, None, :, None]) == 0).all(), f"gradient of {name} at padding"


def test_nan_in_a_real_token_is_not_hidden():
    for phi in ("sigmoid", "elu+1", "relu"):
        inputs = [x.detach().clone() for x in on_device(qkv(40, **SMALL))]
        inputs[1][0, 0, 30, 2] = math.nan
        assert torch.isnan(attend(inputs, phi=phi)[:, :, 30:]).all(), phi


@pytest.mark.parametrize("layout", ["tokens first", "expanded", "channels apart"])
def test_any_layout_agrees(layout):
    def strided(x):
        if layout == "tokens first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "expanded":
            return x[:, :1].expand(-1, 2, -1, -1)
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    inputs = on_device(qkv(40, **{**SMALL, "heads": 2}))
    laid_out = [strided(x) for x in inputs]
    out, expected = attend(laid_out), attend([x.contiguous() for x in laid_out])
    assert torch.equal(out, expected)
    weights = strided(torch.randn(out.shape, device=out.device)[:, : out.shape[1]])
    for actual, wanted in zip(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))):
        assert_close("gradient", actual, wanted)


# --- the state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side, options", [("none", {}), ("holes", FLOW_OPTIONS[-3]), ("left", FLOW_OPTIONS[-1])])
def test_a_sequence_in_pieces_is_the_same_function(side, options):
    """Outputs, and gradients through the states between pieces."""
    inputs, mask = on_device(qkv(40, **{**SMALL, "batch": 2})), padding(side, 2, 40)
    outputs, state = [], None
    for piece in (slice(0, 1), slice(1, 37), slice(37, 40)):
        of_piece = None if mask is None else mask[:, piece]
        out, state = attend(
            [x[:, :, piece] for x in inputs], of_piece, initial_state=state, return_state=True, **options
        )
        outputs.append(out)
    exact = doubled(*on_cpu(inputs))
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    expected = flow_attention_reference(*exact, causal=True, **masks, **options)
    out = torch.cat(outputs, 2).cpu()
    assert_close("out", out, expected.float())
    assert_same_gradients(on_cpu(gradients(out, inputs)), gradients(expected, exact))


@pytest.mark.parametrize("options", [{}, {"allocation": "softmax", "clamp": None}], ids=name_of)
def test_the_state_and_all_its_gradients_are_those_of_the_pytorch_form(options, with_pytorch):
    """float64, which kernels do not support, uses the PyTorch form."""
    first, second = (qkv(40, **{**SMALL, "seed": seed}) for seed in (0, 1))
    results = []
    for convert in (on_device, lambda tensors: doubled(*tensors)):
        _, state = flow_attention(*convert(first), causal=True, return_state=True, **options)
        state = {name: x.detach().requires_grad_(name != "count") for name, x in state.items()}
        inputs = convert(second)
        out, after = flow_attention(*inputs, causal=True, initial_state=state, return_state=True, **options)
        sums = [name for name in state if name != "count"]
        loss = out.cpu().square().sum() + sum((after[name].cpu() * 0.1).sum() for name in sums)
        leaves = [*inputs, *(state[name] for name in sums)]
        actual_gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        results.append({"count": after["count"].double(), **{name: after[name] for name in sums}})
        results[-1].update({f"gradient of {name}": x for name, x in zip([*"qkv", *sums], actual_gradients)})
    for name, actual in results[0].items():
        # Gradients of the sums cancel to a tenth of their terms.
        tolerance = 5e-5 if name.startswith("gradient") else None
        assert_close(name, actual.detach().cpu(), results[1][name].detach().to(actual.dtype), tolerance)


def test_a_state_without_any_gradient_can_be_returned():
    with torch.no_grad():
        out, state = attend(on_device(qkv(65, **SMALL)), return_state=True)
    assert not out.requires_grad and not any(x.requires_grad for x in state.values())


# --- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_a_gradient_of_one_input_alone(wanted):
    inputs = on_device(qkv(65, **SMALL))
    every = dict(zip("qkv", gradients(attend(inputs).cpu(), inputs)))
    alone = {name: x if name == wanted else x.detach() for name, x in zip("qkv", inputs)}
    out = attend(list(alone.values()))
    assert torch.equal(gradients(out.cpu(), [alone[wanted]])[0], every[wanted])


def test_gradients_of_second_order_are_those_of_the_pytorch_form(with_pytorch):
    def second_order(inputs):
        out = flow_attention(*inputs, causal=True, clamp=20.0)
        first = torch.autograd.grad(out.cpu().square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.cpu().sin().sum() for x in first), inputs)

    inputs = qkv(40, **SMALL)
    actual, wanted = on_cpu(second_order(on_device(inputs))), second_order(doubled(*inputs))
    assert_same_gradients(actual, wanted, 1e-4)


class Broken:
    """A kernel that fails on every device."""

    def __getitem__(self, grid):
        raise RuntimeError("no configuration fits this device")


def test_a_backward_kernel_that_fails_gives_way_to_the_pytorch_form(with_pytorch, monkeypatch):
    inputs = on_device(qkv(65, **SMALL))
    wanted = gradients(attend(inputs).cpu(), inputs)
    monkeypatch.setattr(chunks_kernels, "values_backward", Broken())
    out = attend(inputs)
    with pytest.warns(UserWarning, match="flow_attention .*no configuration fits.*LINEARTIME_TRITON=0"):
        actual = gradients(out.cpu(), inputs)
    assert_same_gradients(actual, wanted, TOLERANCES[torch.float32])


def test_what_is_saved_for_the_backward_pass_is_inputs_output_and_little_more():
    """Three flows and three weights of n numbers and, before each of 16 chunks and after the last, four sums of d."""
    inputs = on_device(qkv(512, **{**SMALL, "d": 16, "e": 16}))
    saved = {}

    def remember(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        attend(inputs)
    size = sum(storage.nbytes() for storage in saved.values())
    assert size <= 4 * (4 * 512 * 16 + 6 * 512 + 4 * 17 * 16)
