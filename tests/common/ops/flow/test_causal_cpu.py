"""Causal Flow-Attention in pieces with a backward pass by hand, against the same chunks differentiated by torch."""

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow import causal_cpu, interface
from common.ops.flow.causal import CausalInputs, attention_in_chunks
from common.ops.flow.causal_cpu import causal_attention_in_blocks
from common.ops.flow.options import flow_options
from recipes.bench.harness.memory import peak_beyond, storage_bytes
from tests.common.inputs import padding, qkv
from tests.compare import assert_close

OPTIONS = [
    {},
    {"form": "paper", "phi": "elu+1"},
    {"form": "released_vision", "clamp": None, "allocation": "softmax"},
    {"competition": "sigmoid", "allocation": "none"},
    {"competition": "none", "phi": "relu"},
]
STATE = ("sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming", "log_competition", "log_allocation", "sum_kv")


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    """Of two chunks of four tokens, (2, 2, 4, 5) each, for every thread."""
    monkeypatch.setattr(causal_cpu, "BLOCK_NUMBERS", 160)


def a_state(inputs, options):
    """A state that some other tokens left behind, as leaves of a graph."""
    _, state = attention_in_chunks(CausalInputs(*(x.detach() for x in inputs), None, options, 4, None))
    return {name: x if name == "count" else x.requires_grad_() for name, x in state.items()}


def outcome(form, inputs, mask, options, state):
    """Output, new state, and the gradients of a loss of both with respect to the inputs and the old state."""
    out, after = form(CausalInputs(*inputs, mask, options, 4, state))
    used = [out, *(after[name] for name in STATE)]
    given = [*inputs, *(() if state is None else (state[name] for name in STATE))]
    draw = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in used)
    return [*used, after["count"]], torch.autograd.grad(loss, given, allow_unused=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("side", ["none", "left", "right", "holes", "all"])
@pytest.mark.parametrize("continued", [False, True], ids=["from the start", "continued"])
def test_output_state_and_all_gradients(continued, side, options):
    inputs, mask, options = qkv(23, d=5, e=3), padding(side, 2, 23), flow_options(**options)
    state = a_state(qkv(9, d=5, e=3, seed=1), options) if continued else None
    found, grads = outcome(causal_attention_in_blocks, inputs, mask, options, state)
    expected, wanted = outcome(attention_in_chunks, inputs, mask, options, state)
    for actual, reference in zip(found, expected):
        assert_close("a result", actual.double(), reference.double())
    for name, actual, reference in zip(("q", "k", "v", *STATE), grads, wanted):
        reference = torch.zeros_like(actual) if reference is None else reference
        assert_close(f"gradient of {name}", actual, reference, 1e-9)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradient_of_one_input_alone(wanted):
    inputs = {name: x.detach() for name, x in zip("qkv", qkv(17))}
    everything = [x.clone().requires_grad_() for x in inputs.values()]
    expected = torch.autograd.grad(flow_attention(*everything, causal=True, chunk_size=4).square().sum(), everything)
    inputs[wanted].requires_grad_()
    (actual,) = torch.autograd.grad(flow_attention(**inputs, causal=True, chunk_size=4).square().sum(), inputs[wanted])
    assert_close(wanted, actual, expected["qkv".index(wanted)])


def test_heads_that_lie_behind_the_tokens_in_memory():
    """As they do in a model, whose projections end in (B, n, H d)."""
    plain = qkv(23)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in plain]
    for inputs in (plain, strided):
        flow_attention(*inputs, causal=True, chunk_size=4).square().sum().backward()
    for actual, expected in zip(strided, plain):
        assert_close("gradient", actual.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gradients_come_in_the_dtype_of_the_inputs(dtype):
    inputs = qkv(23, dtype=dtype)
    out = flow_attention(*inputs, causal=True, chunk_size=4)
    assert {x.dtype for x in (out, *torch.autograd.grad(out.sum(), inputs))} == {dtype}


def test_a_backward_pass_under_autocast_is_not_in_half_precision():
    inputs = qkv(64, d=16, e=16, dtype=torch.float32)
    out = flow_attention(*inputs, causal=True, chunk_size=16)
    expected = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = torch.autograd.grad(out.square().sum(), inputs)
    for x, y in zip(actual, expected):
        assert torch.equal(x, y)


def test_only_inputs_and_output_are_kept():
    """As softmax attention does, whatever the number of blocks; flows and states would be 14 numbers a token."""
    kept = []
    inputs = qkv(4096, batch=1, heads=1, d=64, e=64, dtype=torch.float32)
    causal_cpu.BLOCK_NUMBERS = 2**16
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = flow_attention(*inputs, causal=True)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (*inputs, out)}


@pytest.mark.parametrize("length", [128, 300, 1000])
def test_memory_of_both_passes_is_three_times_that_of_the_inputs_at_most(length):
    """Beyond inputs, output and gradients, however long a piece is."""
    causal_cpu.BLOCK_NUMBERS = 2**17
    inputs = qkv(length, batch=1, heads=8, d=64, e=64, dtype=torch.float32)
    weights = torch.ones(1, 8, length, 64)

    def both_passes():
        out = flow_attention(*inputs, causal=True)
        return [out, *torch.autograd.grad(out, inputs, weights)]

    both_passes()
    assert 0 < peak_beyond(both_passes, "cpu") <= 3 * storage_bytes(inputs)


def test_second_derivatives_over_many_pieces():
    inputs = qkv(11, batch=1, heads=1, d=2, e=2)

    def attend(q, k, v):
        return flow_attention(q, k, v, causal=True, clamp=20.0, chunk_size=2)  # a clamp that no flow reaches

    assert torch.autograd.gradgradcheck(attend, inputs)


def test_another_number_of_threads_in_the_backward_pass(monkeypatch):
    """What a thread is given decides on the pieces, which must be those of the forward pass."""
    inputs = qkv(23)
    out = flow_attention(*inputs, causal=True, chunk_size=4)
    expected = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    for x, y in zip(torch.autograd.grad(out.square().sum(), inputs), expected):
        assert torch.equal(x, y)


def test_batches_of_gradients():
    inputs = qkv(11)
    out = flow_attention(*inputs, causal=True, chunk_size=4)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for name, found, expected in zip("qkv", batched, torch.autograd.grad(out, inputs, grad, retain_graph=True)):
            assert_close(f"gradient of {name}", found[i], expected)


def test_what_takes_operations_apart_gets_the_plain_chunks(monkeypatch):
    """functorch, a tracer and a compiler; everything else goes in pieces."""
    calls = []
    attend = interface.causal_attention_in_blocks
    monkeypatch.setattr(interface, "causal_attention_in_blocks", lambda *args: calls.append(1) or attend(*args))
    q, k, v = (x.detach() for x in qkv(9))
    flow_attention(q, k, v, causal=True)
    assert calls == [1]
    torch.func.grad(lambda q: flow_attention(q, k, v, causal=True).sum())(q)
    torch.compile(lambda q: flow_attention(q, k, v, causal=True), backend="eager")(q)
    traced = torch.jit.trace(lambda q: flow_attention(q, k, v, causal=True), q, check_trace=False)
    assert calls == [1] and traced(q).shape == q.shape[:3] + v.shape[3:]
