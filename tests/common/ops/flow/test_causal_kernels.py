"""Causal Flow-Attention by kernels for CPUs, against plain PyTorch and the literal reference."""

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow.causal import STATE_SUMS, CausalInputs, attention_in_chunks
from common.ops.flow.cpu.causal import applies, causal_attention
from common.ops.flow.options import flow_options
from common.ops.flow.reference import flow_attention_reference
from common.ops.shared.cpu.dispatch import VARIABLE
from recipes.bench.harness.memory import peak_beyond, storage_bytes
from tests.common.inputs import LAYOUTS, in_layout, new_memory_is_nan, padding, qkv
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


def same_bits(actual, expected) -> bool:
    return all(torch.equal(x, y) for xs, ys in zip(actual, expected, strict=True) for x, y in zip(xs, ys, strict=True))


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
def test_gradients_by_differences(options):
    options, names = flow_options(**options), STATE_SUMS
    state = a_state(options, batch=1, heads=1)
    with torch.no_grad():
        for name in ("log_competition", "log_allocation"):  # -1e30 for no softmax has no differences
            state[name].clamp_(min=-1.0)
    mask = torch.tensor([[False, True, False, False, False, False, True]])

    def attend(q, k, v, *sums):
        before = {"count": state["count"], **dict(zip(names, sums))}
        out, after = causal_attention(CausalInputs(q, k, v, mask, options, 64, before))
        return out, *(after[name] for name in names)

    inputs = [*qkv(7, batch=1, heads=1), *(state[name] for name in names)]
    # relu is not differentiable at 0, where no input is
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_reference_also_with_large_logits(scale, options):
    """Without a clamp, the softmax over the flows of features of 30 and more is almost a maximum."""
    q, k, v = (x.detach() for x in qkv(40, scale=scale))
    expected = flow_attention_reference(q, k, v, causal=True, **options)
    with torch.no_grad():
        actual, _ = causal_attention(CausalInputs(q, k, v, None, flow_options(**options), 64, None))
    assert_close("out", actual, expected, 1e-10)


def test_a_padded_token_may_be_nan():
    inputs, mask = qkv(13), padding("holes", 2, 13)
    clean = [x.detach().masked_fill(mask[:, None, :, None], 0.0).requires_grad_() for x in inputs]
    dirty = [x.detach().masked_fill(mask[:, None, :, None], float("nan")).requires_grad_() for x in inputs]
    options = flow_options()
    outputs, grads = outcome(causal_attention, dirty, mask, options, None)
    assert same_bits((outputs, grads), outcome(causal_attention, clean, mask, options, None))
    for x in (outputs[0], *grads):
        assert not x[mask[:, None, :, None].expand_as(x)].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_hosts(layout):
    inputs = [x.requires_grad_() for x in in_layout(layout, qkv(10, d=6, e=6))]
    check_both_passes(inputs, None, flow_options(), None)


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


@pytest.mark.parametrize("n", [1, 6, 70])
@pytest.mark.parametrize("continued", [False, True], ids=["from the start", "continued"])
def test_nothing_is_read_before_it_is_written(continued, n):
    options, mask = flow_options(allocation="softmax"), padding("holes", 2, n) if n > 1 else None
    state = a_state(options) if continued else None
    inputs = qkv(n)
    expected = outcome(causal_attention, inputs, mask, options, state)
    with new_memory_is_nan():
        assert same_bits(outcome(causal_attention, inputs, mask, options, state), expected)


def test_several_threads_compute_the_same_bits():
    inputs, threads, options = (
        qkv(300, heads=5, d=64, e=64, dtype=torch.float32),
        torch.get_num_threads(),
        flow_options(),
    )
    expected = outcome(causal_attention, inputs, None, options, None)
    torch.set_num_threads(3)
    try:
        actual = outcome(causal_attention, inputs, None, options, None)
    finally:
        torch.set_num_threads(threads)
    assert same_bits(actual, expected)


@pytest.mark.parametrize("batch, heads", [(0, 2), (2, 0)])
def test_inputs_without_rows_or_heads(batch, heads):
    inputs = qkv(5, batch=batch, heads=heads)
    out, state = flow_attention(*inputs, causal=True, return_state=True)
    assert out.shape == (batch, heads, 5, 3) and state["sum_kv"].shape == (batch, heads, 5, 3)
    assert all(grad.shape == x.shape for grad, x in zip(torch.autograd.grad(out.sum(), inputs), inputs))


def test_a_backward_pass_under_autocast_is_not_in_half_precision():
    inputs = qkv(64, d=16, e=16, dtype=torch.float32)
    out = flow_attention(*inputs, causal=True)
    expected = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
        by_graph = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    for name, x, y, z in zip("qkv", actual, expected, by_graph):
        assert torch.equal(x, y)
        assert_close(f"gradient of {name} by a graph", z, y)


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 8), (2, 8)])
def test_beside_inputs_and_output_five_numbers_for_each_token_are_kept(batch, heads):
    """For each row and head; and the state after the tokens: a 64 x 64 matrix, four 64-vectors and two numbers."""
    saved, n = [], 2048
    inputs = qkv(n, batch=batch, heads=heads, d=64, e=64, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = flow_attention(*inputs, causal=True)
    addresses = {x.data_ptr() for x in (*inputs, out)}
    assert addresses <= {x.data_ptr() for x in saved}
    others = storage_bytes([x for x in saved if x.data_ptr() not in addresses])
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
    assert 0 < peak_beyond(both_passes, "cpu") <= bound * storage_bytes(inputs)


def test_batches_of_gradients():
    inputs = qkv(11)
    out = flow_attention(*inputs, causal=True, chunk_size=4)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for name, actual, expected in zip("qkv", batched, torch.autograd.grad(out, inputs, grad, retain_graph=True)):
            assert_close(f"gradient of {name}", actual[i], expected)


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


def test_kernels_turned_off(monkeypatch):
    inputs = [x.detach() for x in qkv(20)]
    expected = flow_attention(*inputs, causal=True)
    monkeypatch.setenv(VARIABLE, "0")
    assert not applies(CausalInputs(*inputs, None, flow_options(), 64, None))
    assert_close("out", flow_attention(*inputs, causal=True), expected, 1e-10)


@pytest.mark.parametrize("clamp", [1.0, None])
def test_torch_compile_calls_the_kernels(clamp):
    """aot_eager, since it traces both passes and compiles no code."""
    inputs, graphs = qkv(12), []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    compiled = torch.compile(lambda q, k, v: flow_attention(q, k, v, causal=True, clamp=clamp), backend=backend)
    out, expected = compiled(*inputs), flow_attention(*inputs, causal=True, clamp=clamp)
    assert_close("out", out, expected, 1e-12)
    grads, expected_grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
    assert_all_close("qkv", grads, expected_grads, 1e-12)
    assert len(graphs) == 1 and "lineartime.causal_flow" in graphs[0].code


@pytest.mark.parametrize("side", ["none", "holes"])
def test_the_operator_keeps_what_pytorch_asks_of_operators(side):
    """Traces both passes with changing sizes, which takes seconds."""
    inputs, state = qkv(9), a_state(flow_options())
    constants = 1, 0, 1, 1e-6, 0.0, float("inf")  # sigmoid features, softmax competition, sigmoid allocation
    arguments = (*inputs, padding(side, 2, 9), state["count"], *(state[name] for name in STATE_SUMS), *constants)
    torch.library.opcheck(torch.ops.lineartime.causal_flow.default, arguments)
