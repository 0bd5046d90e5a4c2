"""Causal Flow-Attention in blocks with a backward pass by hand, against the same chunks differentiated by torch."""

import pytest
import torch

from common.ops import flow_attention
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


#: Of chunks of 64 tokens; a block of 2**17 numbers has two of them, so that there are two blocks and a shorter rest.
CHUNK_SIZE = 64


def several_blocks(n: int = 300, **options):
    """Inputs of two rows of eight heads."""
    return qkv(n, **{"batch": 2, "heads": 8, "d": 64, "e": 48, **options})


def a_state(inputs, options):
    """A state after some other tokens, as leaves of a graph."""
    _, state = attention_in_chunks(CausalInputs(*(x.detach() for x in inputs), None, options, CHUNK_SIZE, None))
    return {name: x if name == "count" else x.requires_grad_() for name, x in state.items()}


def outcome(form, inputs, mask, options, state):
    """Output, new state, and the gradients of a loss of both with respect to the inputs and the old state."""
    out, after = form(CausalInputs(*inputs, mask, options, CHUNK_SIZE, state))
    used = [out, *(after[name] for name in STATE)]
    given = [*inputs, *(() if state is None else (state[name] for name in STATE))]
    draw = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in used)
    return [*used, after["count"]], torch.autograd.grad(loss, given, allow_unused=True)


@pytest.mark.parametrize("side, options", list(zip(["none", "left", "right", "holes", "all"], OPTIONS)), ids=str)
@pytest.mark.parametrize("continued", [False, True], ids=["from the start", "continued"])
def test_output_state_and_all_gradients(continued, side, options):
    inputs, mask, options = several_blocks(), padding(side, 2, 300), flow_options(**options)
    state = a_state(several_blocks(9, seed=1), options) if continued else None
    found, grads = outcome(causal_attention_in_blocks, inputs, mask, options, state)
    expected, wanted = outcome(attention_in_chunks, inputs, mask, options, state)
    for actual, reference in zip(found, expected):
        assert_close("a result", actual.double(), reference.double())
    for name, actual, reference in zip(("q", "k", "v", *STATE), grads, wanted):
        reference = torch.zeros_like(actual) if reference is None else reference
        assert_close(f"gradient of {name}", actual, reference, 1e-9)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradient_of_one_input_alone(wanted):
    inputs = {name: x.detach() for name, x in zip("qkv", several_blocks(150))}
    everything = [x.clone().requires_grad_() for x in inputs.values()]
    expected = torch.autograd.grad(flow_attention(*everything, causal=True).square().sum(), everything)
    inputs[wanted].requires_grad_()
    (actual,) = torch.autograd.grad(flow_attention(**inputs, causal=True).square().sum(), inputs[wanted])
    assert_close(wanted, actual, expected["qkv".index(wanted)])


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
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = flow_attention(*inputs, causal=True)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (*inputs, out)}


@pytest.mark.parametrize("length", [128, 300, 1000])
def test_memory_of_both_passes_is_three_times_that_of_the_inputs_at_most(length):
    """Beyond inputs, output and gradients, however long a piece is."""
    inputs = qkv(length, batch=1, heads=8, d=64, e=64, dtype=torch.float32)
    weights = torch.ones(1, 8, length, 64)

    def both_passes():
        out = flow_attention(*inputs, causal=True)
        return [out, *torch.autograd.grad(out, inputs, weights)]

    both_passes()
    assert 0 < peak_beyond(both_passes, "cpu") <= 3 * storage_bytes(inputs)


def test_another_number_of_threads_in_the_backward_pass():
    """A block has so many numbers for each thread, and must be that of the forward pass."""
    inputs, threads = several_blocks(), torch.get_num_threads()
    out = flow_attention(*inputs, causal=True)
    expected = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    torch.set_num_threads(threads + 1)
    try:
        found = torch.autograd.grad(out.square().sum(), inputs)
    finally:
        torch.set_num_threads(threads)
    for name, actual, wanted in zip("qkv", found, expected):
        assert_close(f"gradient of {name}", actual, wanted, 1e-12)


def test_batches_of_gradients():
    inputs = qkv(11)
    out = flow_attention(*inputs, causal=True, chunk_size=4)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for name, found, expected in zip("qkv", batched, torch.autograd.grad(out, inputs, grad, retain_graph=True)):
            assert_close(f"gradient of {name}", found[i], expected)
