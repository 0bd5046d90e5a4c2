"""Causal Flow-Attention in blocks with a manual backward pass, against autograd through the same chunks."""

import pytest
import torch

from common.ops import flow_attention
from common.ops.flow import causal
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


#: A block of 2**17 numbers is four chunks of one row, so each row has a block and a shorter remainder.
CHUNK_SIZE = 64


def several_blocks(n: int = 300, **options):
    """Inputs of two rows of eight heads."""
    return qkv(n, **{"batch": 2, "heads": 8, "d": 64, "e": 48, **options})


def a_state(inputs, options):
    """A state after some other tokens, as leaves of a graph."""
    _, state = attention_in_chunks(CausalInputs(*(x.detach() for x in inputs), None, options, CHUNK_SIZE, None))
    return {name: x if name == "count" else x.requires_grad_() for name, x in state.items()}


def check_output_state_and_all_gradients(inputs, mask, options, state):
    """Compare blocks with one graph of all chunks."""
    outputs, grads = outcome(causal_attention_in_blocks, inputs, mask, options, state)
    expected, wanted = outcome(attention_in_chunks, inputs, mask, options, state)
    for actual, reference in zip(outputs, expected):
        assert_close("a result", actual.double(), reference.double())
    for name, actual, reference in zip(("q", "k", "v", *STATE), grads, wanted):
        reference = torch.zeros_like(actual) if reference is None else reference
        assert_close(f"gradient of {name}", actual, reference, 1e-9)


def outcome(form, inputs, mask, options, state):
    """Output, new state, and the gradients of a loss of both with respect to the inputs and the old state."""
    out, after = form(CausalInputs(*inputs, mask, options, CHUNK_SIZE, state))
    used = [out, *(after[name] for name in STATE)]
    leaves = [*inputs, *(() if state is None else (state[name] for name in STATE))]
    draw = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in used)
    return [*used, after["count"]], torch.autograd.grad(loss, leaves, allow_unused=True)


@pytest.mark.parametrize("side, options", list(zip(["none", "left", "right", "holes", "all"], OPTIONS)), ids=str)
@pytest.mark.parametrize("continued", [False, True], ids=["from the start", "continued"])
def test_output_state_and_all_gradients(continued, side, options):
    inputs, mask, options = several_blocks(), padding(side, 2, 300), flow_options(**options)
    state = a_state(several_blocks(9, seed=1), options) if continued else None
    check_output_state_and_all_gradients(inputs, mask, options, state)


@pytest.mark.parametrize("batch, heads, n", [(2, 12, 300), (1, 8, 512), (5, 8, 100), (3, 3, 257), (0, 2, 5), (2, 0, 5)])
def test_some_heads_of_some_rows_at_a_time(batch, heads, n):
    sizes, options = {"batch": batch, "heads": heads, "d": 64, "e": 48}, flow_options()
    state = a_state(qkv(9, seed=1, **sizes), options)
    mask = padding("holes", batch, n) if batch else None
    check_output_state_and_all_gradients(qkv(n, **sizes), mask, options, state)


def test_a_backward_pass_under_autocast_is_not_in_half_precision():
    inputs = qkv(64, d=16, e=16, dtype=torch.float32)
    out = flow_attention(*inputs, causal=True, chunk_size=16)
    expected = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = torch.autograd.grad(out.square().sum(), inputs)
    for x, y in zip(actual, expected):
        assert torch.equal(x, y)


@pytest.mark.parametrize("n, lengths", [(40, [40]), (300, [256, 44]), (449, [448, 1]), (600, [320, 256, 24])])
def test_blocks_are_of_whole_chunks_and_none_is_short(n, lengths, monkeypatch):
    """A short block needs almost as many calls as a long one."""
    lengths_seen, form = [], causal.causal_flow

    def watched(features, *others):
        lengths_seen.append(features[0, 0, 0, ..., 0].numel())
        return form(features, *others)

    monkeypatch.setattr(causal, "causal_flow", watched)
    flow_attention(*(x.detach() for x in several_blocks(n, batch=1)), causal=True)
    assert lengths_seen == lengths


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 8), (2, 8), (1, 12)])
def test_beside_inputs_and_output_flows_and_a_matrix_for_256_tokens_are_kept(batch, heads):
    """For each row and head, however many: 14 numbers per token, and a 64 x 64 matrix and five 64-vectors per block."""
    saved, n = [], 2048
    inputs = qkv(n, batch=batch, heads=heads, d=64, e=64, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = flow_attention(*inputs, causal=True)
    addresses = {x.data_ptr() for x in (*inputs, out)}
    assert addresses <= {x.data_ptr() for x in saved}
    others = storage_bytes([x for x in saved if x.data_ptr() not in addresses])
    assert 0 < others <= 4 * batch * heads * (14 * n + n // 256 * 64 * (64 + 5))


def test_nothing_is_kept_where_no_gradient_is_needed():
    saved = []
    inputs = [x.detach() for x in several_blocks()]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = flow_attention(*inputs, causal=True)
    assert not saved and out.grad_fn is None


def test_the_backward_pass_does_not_form_flows_again(monkeypatch):
    calls, form = [], causal.causal_flow
    monkeypatch.setattr(causal, "causal_flow", lambda *arguments: calls.append(1) or form(*arguments))
    inputs = several_blocks()
    out = flow_attention(*inputs, causal=True)
    blocks = len(calls)
    torch.autograd.grad(out.sum(), inputs)
    assert len(calls) == blocks == 4  # for each row, 256 tokens and 44


@pytest.mark.parametrize("changed", ["q", "k", "v", "the output", "the state"])
def test_what_was_changed_in_place_is_noticed(changed):
    inputs, options = several_blocks(), flow_options()
    state = {name: x.detach() for name, x in a_state(several_blocks(9, seed=1), options).items()}
    out, _ = causal_attention_in_blocks(CausalInputs(*inputs, None, options, CHUNK_SIZE, state))
    tensors = {**dict(zip("qkv", inputs)), "the output": out, "the state": state["sum_kv"]}
    loss = out.sum()
    with torch.no_grad():
        tensors[changed].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("length", "bound"), [(128, 3.5), (300, 3), (1000, 1.2)])
def test_memory_of_both_passes_beyond_that_of_the_inputs(length, bound):
    """Beyond output and gradients, only the memory of a block and some numbers per token and head is used."""
    inputs = qkv(length, batch=1, heads=8, d=64, e=64, dtype=torch.float32)
    weights = torch.ones(1, 8, length, 64)

    def both_passes():
        out = flow_attention(*inputs, causal=True)
        return [out, *torch.autograd.grad(out, inputs, weights)]

    both_passes()
    assert 0 < peak_beyond(both_passes, "cpu") <= bound * storage_bytes(inputs)


def test_another_number_of_threads_in_the_backward_pass():
    """The block size depends on the number of threads, and must be that of the forward pass."""
    inputs, threads = several_blocks(), torch.get_num_threads()
    out = flow_attention(*inputs, causal=True)
    expected = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    torch.set_num_threads(threads + 1)
    try:
        actual_gradients = torch.autograd.grad(out.square().sum(), inputs)
    finally:
        torch.set_num_threads(threads)
    for name, actual, wanted in zip("qkv", actual_gradients, expected):
        assert_close(f"gradient of {name}", actual, wanted, 1e-12)


def test_batches_of_gradients():
    inputs = qkv(11)
    out = flow_attention(*inputs, causal=True, chunk_size=4)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        for name, actual, expected in zip("qkv", batched, torch.autograd.grad(out, inputs, grad, retain_graph=True)):
            assert_close(f"gradient of {name}", actual[i], expected)
