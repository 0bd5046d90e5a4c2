"""Causal Flow-Attention by kernels for CPUs, against plain PyTorch and the literal reference."""

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow.causal import STATE_SUMS, CausalInputs, attention_in_chunks
from common.ops.flow.cpu.causal import applies, causal_attention
from common.ops.flow.options import flow_options
from common.ops.flow.reference import flow_attention_reference
from recipes.runs import peak_bytes
from tests.common.inputs import padding, qkv
from tests.compare import assert_all_close, assert_close

pytest.importorskip("numba")

OPTIONS = [
    {},
    {"form": "paper", "phi": "elu+1"},
    {"form": "released_vision", "clamp": None, "allocation": "softmax"},
    {"clamp": 0.3, "allocation": "softmax", "phi": "elu+1"},
    {"competition": "sigmoid", "allocation": "none", "clamp": 0.3},
    {"competition": "none", "phi": "relu"},
]
SIDES = ["none", "left", "right", "holes", "all"]


def a_state(options, **sizes):
    """A state after some other tokens, as leaves of a graph."""
    tokens = (x.detach() for x in qkv(9, seed=1, **sizes))
    _, state = attention_in_chunks(CausalInputs(*tokens, None, options, 64, None))
    return {name: x if name == "count" else x.requires_grad_() for name, x in state.items()}


def outcome(form, inputs, mask, options, state):
    """Output and new state, and the gradients of a loss of both with respect to the inputs and the old state."""
    out, after = form(CausalInputs(*inputs, mask, options, 64, state))
    used = [out, *(after[name] for name in STATE_SUMS)]
    leaves = [*inputs, *(() if state is None else (state[name] for name in STATE_SUMS))]
    draw = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in used)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [*used, after["count"].double()], grads


def check_both_passes(inputs, mask, options, state, tolerance=1e-10, grad_tolerance=1e-10):
    """Compare outputs, states and all gradients with those of plain PyTorch."""
    assert applies(CausalInputs(*inputs, mask, options, 64, state))
    outputs, grads = outcome(causal_attention, inputs, mask, options, state)
    expected, expected_grads = outcome(attention_in_chunks, inputs, mask, options, state)
    for name, actual, reference in zip(("out", *STATE_SUMS, "count"), outputs, expected, strict=True):
        assert_close(name, actual, reference, tolerance)
    assert_all_close(("q", "k", "v", *STATE_SUMS)[: len(grads)], grads, expected_grads, grad_tolerance)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65, 257])
@pytest.mark.parametrize("continued", [False, True], ids=["from the start", "continued"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_states_and_gradients(options, continued, n):
    options, sizes = flow_options(**options), {"batch": 3, "heads": 2, "d": 7, "e": 5}
    mask = padding(SIDES[n % len(SIDES)], 3, n) if n > 5 else None
    check_both_passes(qkv(n, **sizes), mask, options, a_state(options, **sizes) if continued else None)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("d, e", [(1, 1), (3, 7), (7, 1), (64, 65), (65, 64)])
def test_sizes_and_padding(d, e, side):
    sizes, options = {"batch": 2, "heads": 2, "d": d, "e": e}, flow_options()
    check_both_passes(qkv(66, **sizes), padding(side, 2, 66), options, a_state(options, **sizes))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float32(options):
    inputs = qkv(130, d=64, e=64, dtype=torch.float32)
    check_both_passes(inputs, None, flow_options(**options), None, tolerance=2e-6, grad_tolerance=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_reference_also_with_large_logits(scale, options):
    """Without a clamp, the softmax over the flows of features of 30 and more is almost a maximum."""
    q, k, v = (x.detach() for x in qkv(40, scale=scale))
    expected = flow_attention_reference(q, k, v, causal=True, **options)
    with torch.no_grad():
        actual, _ = causal_attention(CausalInputs(q, k, v, None, flow_options(**options), 64, None))
    assert_close("out", actual, expected, 1e-10)


def test_a_state_with_other_strides():
    options = flow_options()
    state = a_state(options)
    turned = {
        name: x if name == "count" else x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        for name, x in state.items()
    }
    inputs = qkv(5)
    check_both_passes(inputs, None, options, turned)
    step = [x[:, :, :1].detach() for x in inputs]
    with torch.no_grad():
        actual, _ = causal_attention(CausalInputs(*step, None, options, 64, turned))
        expected, _ = attention_in_chunks(CausalInputs(*step, None, options, 64, state))
    assert_close("out", actual, expected, 1e-10)


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 8), (2, 8)])
def test_beside_inputs_and_output_five_numbers_for_each_token_are_kept(batch, heads):
    """For each row and head; and the state after the tokens: a 64 x 64 matrix, four 64-vectors and two numbers."""
    saved, n = [], 2048
    inputs = qkv(n, batch=batch, heads=heads, d=64, e=64, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = flow_attention(*inputs, causal=True)
    addresses = {x.data_ptr() for x in (*inputs, out)}
    assert addresses <= {x.data_ptr() for x in saved}
    others = sum({x.data_ptr(): x.untyped_storage().nbytes() for x in saved if x.data_ptr() not in addresses}.values())
    assert 0 < others <= 4 * batch * heads * (5 * n + 64 * (64 + 4) + 2)


def test_nothing_is_kept_where_no_gradient_is_needed():
    saved = []
    inputs = [x.detach() for x in qkv(70)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = flow_attention(*inputs, causal=True)
    assert not saved and out.grad_fn is None


@pytest.mark.parametrize("changed", ["q", "k", "v", "the output", "the state"])
def test_what_was_changed_in_place_is_noticed(changed):
    inputs, options = qkv(20), flow_options()
    state = {name: x.detach() for name, x in a_state(options).items()}
    out, _ = causal_attention(CausalInputs(*inputs, None, options, 64, state))
    tensors = {**dict(zip("qkv", inputs)), "the output": out, "the state": state["sum_kv"]}
    loss = out.sum()
    with torch.no_grad():
        tensors[changed].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("length, bound", [(128, 2), (1000, 1.6)])
def test_memory_of_both_passes_beyond_that_of_the_inputs(length, bound):
    """Output, gradients, and some numbers for each token and head."""
    inputs = qkv(length, batch=1, heads=8, d=64, e=64, dtype=torch.float32)
    weights = torch.ones(1, 8, length, 64)

    def both_passes():
        out = flow_attention(*inputs, causal=True)
        return [out, *torch.autograd.grad(out, inputs, weights)]

    both_passes()
    assert 0 < peak_bytes(both_passes) <= bound * sum(x.nbytes for x in inputs)


@pytest.mark.parametrize("tangent_of", ["q", "sum_k", "sum_kv"])
def test_forward_mode_takes_plain_pytorch(tangent_of):
    inputs, state = [x.detach() for x in qkv(6)], {name: x.detach() for name, x in a_state(flow_options()).items()}
    named = dict(zip("qkv", inputs)) | state

    def attend(x):
        values = named | {tangent_of: x}
        tokens, before = (values[name] for name in "qkv"), {name: values[name] for name in state}
        return flow_attention(*tokens, causal=True, initial_state=before)

    point = named[tangent_of]
    direction = torch.ones_like(point)
    with torch.autograd.forward_ad.dual_level():
        out = attend(torch.autograd.forward_ad.make_dual(point, direction))
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    difference = (attend(point + 1e-5 * direction) - attend(point - 1e-5 * direction)) / 2e-5
    assert_close("tangent", tangent, difference, 1e-6)


@pytest.mark.parametrize("side", ["none", "holes"])
def test_the_operator_keeps_what_pytorch_asks_of_operators(side):
    """Traces both passes with changing sizes, which takes seconds."""
    inputs, state = qkv(9), a_state(flow_options())
    constants = 1, 0, 1, 1e-6, 0.0, float("inf")  # sigmoid features, softmax competition, sigmoid allocation
    arguments = (*inputs, padding(side, 2, 9), state["count"], *(state[name] for name in STATE_SUMS), *constants)
    torch.library.opcheck(torch.ops.lineartime.causal_flow.default, arguments)
