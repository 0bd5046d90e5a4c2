"""Causal sums that decay, per head or per feature, against a loop over the tokens."""

import pytest
import torch
from torch import Tensor

from common.ops.shared.feature_sums import causal_sums
from tests.compare import assert_all_close, assert_close, gradients
from tests.torch_versions import NEWER_THAN_2_6

B, H, F, E = 2, 3, 5, 4


def inputs(
    n: int, strength: float = 1.0, dtype: torch.dtype = torch.float64, batch: int = B, features: int = F
) -> dict[str, Tensor]:
    """q, k, v and a ``log_decay`` of each feature, from 0 to about -2 ``strength``, as leaves."""
    generator = torch.Generator().manual_seed(n)
    shapes = {"q": features, "k": features, "v": E, "log_decay": features}
    tensors = {
        x: torch.randn(batch, H, n, width, generator=generator, dtype=torch.float64) for x, width in shapes.items()
    }
    tensors["log_decay"] = -strength * tensors["log_decay"].abs()
    return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}


def state(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = {"sum_k": (B, H, F), "sum_kv": (B, H, F, E)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def token_by_token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: dict[str, Tensor] | None):
    """``causal_sums`` by its recurrence."""
    sum_k = torch.zeros_like(k[:, :, 0]) if state is None else state["sum_k"]
    sum_kv = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]) if state is None else state["sum_kv"]
    values, weights = [], []
    for t in range(q.shape[2]):
        decay = torch.exp(log_decay[:, :, t])
        sum_k = decay * sum_k + k[:, :, t]
        sum_kv = decay[..., None] * sum_kv + k[:, :, t, :, None] * v[:, :, t, None, :]
        values.append((q[:, :, t, :, None] * sum_kv).sum(2))
        weights.append((q[:, :, t] * sum_k).sum(2, keepdim=True))
    return torch.stack(values, 2), torch.stack(weights, 2), {"sum_k": sum_k, "sum_kv": sum_kv}


def flat(values: Tensor, weights: Tensor, state: dict[str, Tensor]) -> Tensor:
    """All results of ``causal_sums`` in one list."""
    return torch.cat([x.flatten() for x in (values, weights, state["sum_k"], state["sum_kv"])])


def agree(found, expected, leaves: dict[str, Tensor], tolerance: float | None = None) -> None:
    found, expected = flat(*found), flat(*expected)
    assert_close("sums", found, expected, tolerance)
    pair = gradients(found, leaves.values()), gradients(expected, leaves.values())
    assert_all_close(leaves, *pair, tolerance)


@pytest.mark.parametrize("begun", [False, True], ids=["start", "continued"])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 16, 31])
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 64])
def test_features_that_decay_are_the_recurrence(n, chunk_size, begun):
    """Lengths within a chunk, at its border and over several; chunk sizes that are no power of two."""
    arguments, before = inputs(n), state() if begun else None
    actual = causal_sums(**arguments, chunk_size=chunk_size, state=before)
    agree(actual, token_by_token(**arguments, state=before), {**arguments, **(before or {})})


@pytest.mark.parametrize("n", [300, 700])
def test_more_than_what_a_cpu_computes_at_once(n):
    """With 300 tokens, two rows of the batch and then the third; with 700, each row in two parts."""
    arguments = inputs(n, 0.1, batch=3, features=64)
    agree(causal_sums(**arguments, chunk_size=64, state=None), token_by_token(**arguments, state=None), arguments)


@pytest.mark.parametrize("strength", [0.0, 1e-6, 100.0])
def test_decays_near_none_and_near_all(strength):
    arguments, before = inputs(37, strength), state()
    actual = causal_sums(**arguments, chunk_size=8, state=before)
    agree(actual, token_by_token(**arguments, state=before), {**arguments, **before})


def test_one_feature_may_forget_all_and_another_nothing():
    """A decay of exp(-100) per token, in float32, leaves only the token itself; a neighbour without decay sums all."""
    arguments = inputs(70, dtype=torch.float32)
    log_decay = torch.zeros(B, H, 70, F)
    log_decay[..., ::2] = -100.0
    arguments["log_decay"] = log_decay.requires_grad_()
    actual = causal_sums(**arguments, chunk_size=16, state=None)
    double = {name: x.detach().double().requires_grad_() for name, x in arguments.items()}
    expected = token_by_token(**double, state=None)
    assert_close("sums", flat(*actual), flat(*expected))
    pair = gradients(flat(*actual), arguments.values()), gradients(flat(*expected), double.values())
    assert_all_close(arguments, *pair)
    of_closed = pair[0][-1][..., ::2]
    assert of_closed.abs().max() < 1e-30, "no rounding errors of others"


def test_a_closed_gate_takes_no_precision_from_tokens_after_it():
    arguments = {name: x.detach() for name, x in inputs(30, 0.05, torch.float32).items()}
    arguments["log_decay"][:, :, 13] = -1e4
    values, weights, _ = causal_sums(**arguments, chunk_size=8, state=None)
    later = {name: x[:, :, 13:] for name, x in arguments.items()}
    alone_values, alone_weights, _ = causal_sums(**later, chunk_size=8, state=None)
    assert_close("values", values[:, :, 13:], alone_values)
    assert_close("weights", weights[:, :, 13:], alone_weights)


@pytest.mark.parametrize("strength", [1e-3, 1.0, 50.0])
def test_thousands_of_tokens_in_float32(strength):
    """Decays whose product over the sequence is far below the smallest float, and decays that remember thousands."""
    arguments = inputs(4096, strength, torch.float32, batch=1)
    actual = causal_sums(**arguments, chunk_size=64, state=None)
    double = {name: x.detach().double().requires_grad_() for name, x in arguments.items()}
    expected = causal_sums(**double, chunk_size=16, state=None)
    assert_close("sums", flat(*actual), flat(*expected))
    pair = gradients(flat(*actual), arguments.values()), gradients(flat(*expected), double.values())
    assert_all_close(arguments, *pair)


def test_gradients_of_gradients():
    arguments, before = inputs(11, batch=1), {name: x[:1].detach().requires_grad_() for name, x in state().items()}

    def sums(*tensors: Tensor) -> Tensor:
        q, k, v, log_decay, sum_k, sum_kv = tensors
        # Squared, as a decay of 0 is at the limit of what is allowed.
        return flat(*causal_sums(q, k, v, 4, {"sum_k": sum_k, "sum_kv": sum_kv}, -log_decay.square()))

    tensors = (*arguments.values(), *before.values())
    assert torch.autograd.gradcheck(sums, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(sums, tensors, fast_mode=True)


@pytest.fixture
def nothing_compiled_before() -> None:
    """Discard the graphs of other tests."""
    torch._dynamo.reset()


@pytest.mark.parametrize("begun", [False, True], ids=["start", "continued"])
def test_sums_of_features_that_decay_by_themselves_are_compiled_for_any_length(begun, nothing_compiled_before):
    compiled = torch.compile(causal_sums, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (19, 12, 33):
        before, arguments = state() if begun else None, inputs(n)
        call = {"chunk_size": 8, "state": before, **arguments}
        with torch.compiler.set_stance("fail_on_recompile" if NEWER_THAN_2_6 and n != 19 else "default"):
            actual = compiled(**call)
        agree(actual, causal_sums(**call), {**arguments, **(before or {})})


@pytest.mark.skipif(not NEWER_THAN_2_6, reason="torch 2.6 cannot tell torch.compile from torch.export")
def test_their_graph_does_not_grow_with_the_chunk(nothing_compiled_before):
    """In plain PyTorch, each halving of a chunk is some dozens of operations, which take minutes to compile."""
    sizes = []

    def count(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    for chunk_size in (2, 64):
        torch._dynamo.reset()
        torch.compile(causal_sums, backend=count, fullgraph=True)(**inputs(70), chunk_size=chunk_size, state=None)
    assert sizes[0] == sizes[1]


def test_the_weights_leave_the_length_of_a_compiled_graph_free():
    """With inductor and a backward pass that keeps the weights; a length marked dynamic that gets fixed is an error."""
    inputs = [torch.rand(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)

    def mean(q, k, v):
        values, weights, _ = causal_sums(q, k, v, 16, None)
        return values / weights.clamp(min=1e-3)

    compiled = torch.compile(mean, fullgraph=True)
    assert_close("out", compiled(*inputs), mean(*inputs))
