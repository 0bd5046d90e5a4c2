"""Random feature attention beyond the contract: its kernel, its gate, its floor, its directions."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import rfa_attention
from common.ops.rfa.reference import rfa_attention_reference
from tests.common.inputs import padding, qkv
from tests.common.refusals import refused
from tests.compare import assert_all_close, assert_close, gradients

H, D = 2, 4


def directions(count: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(H, count, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gates(n: int, scale: float = 1.0) -> torch.Tensor:
    logits = torch.randn(2, H, n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return F.logsigmoid(scale * logits).requires_grad_()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_it_estimates_attention_with_a_gaussian_kernel(causal):
    with torch.no_grad():
        q, k, v = qkv(11, d=D, e=3)
        out = rfa_attention(q, k, v, directions(60_000), causal=causal, floor=1e-6)
        distances = torch.cdist(F.normalize(q, dim=-1), F.normalize(k, dim=-1))
        weights = torch.exp(-distances.square() / 2)
        weights = weights.tril() if causal else weights
        assert_close("out", out, weights / weights.sum(-1, keepdim=True) @ v, 0.03)


@pytest.mark.parametrize("side", ["none", "holes"])
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_the_gate_is_the_recurrence(chunk_size, side):
    """Over several chunks and parts of them, with gates from nearly 0 to nearly 1."""
    inputs, log_gate, mask = qkv(39, d=D), gates(39, scale=4.0), padding(side, 2, 39)
    options = {"causal": True, "floor": 0.01, "key_padding_mask": mask, "query_padding_mask": mask}
    out = rfa_attention(*inputs, directions(), log_gate=log_gate, chunk_size=chunk_size, **options)
    expected = rfa_attention_reference(*inputs, directions(), log_gate=log_gate, **options)
    assert_close("out", out, expected)
    leaves = [*inputs, log_gate]
    assert_all_close(("q", "k", "v", "gate"), gradients(out, leaves), gradients(expected, leaves))


def test_many_chunks_carry_their_decay():
    """More than twice as many chunks as one matrix product joins."""
    inputs, log_gate = qkv(2100, d=D, batch=1), F.logsigmoid(torch.full((1, H, 2100), 7.0, dtype=torch.float64))
    options = {"log_gate": log_gate, "causal": True, "floor": 0.01}
    with torch.no_grad():
        short, long = (rfa_attention(*inputs, directions(), chunk_size=size, **options) for size in (2, 2100))
    assert_close("out", short, long)


def test_a_closed_gate_forgets_whatever_came_before():
    """A decay of exp(-10,000) in one token leaves no trace, and does not reduce the precision of later tokens."""
    inputs = qkv(30, d=D, dtype=torch.float32)
    log_gate = torch.full((2, H, 30), -0.05)
    log_gate[:, :, 12] = -1e4
    options = {"causal": True, "floor": 0.01, "chunk_size": 8}
    with torch.no_grad():
        out = rfa_attention(*inputs, directions(), log_gate=log_gate, **options)
        later = [x[:, :, 12:] for x in inputs]
        alone = rfa_attention(*later, directions(), log_gate=log_gate[:, :, 12:], **options)
    assert_close("after the closed gate", out[:, :, 12:], alone)


def test_a_small_normaliser_is_raised_to_the_floor():
    inputs = [x.detach() for x in qkv(3, d=D, batch=1)]
    low, high = (rfa_attention(*inputs, directions(), floor=floor) for floor in (50.0, 100.0))
    assert_close("out", low, 2 * high)


def test_training_draws_directions_and_evaluation_repeats():
    module = build_attention("rfa", num_heads=H, head_dim=D, features=6).double()
    inputs = qkv(9, d=D)
    module.train()
    first, second = module(*inputs), module(*inputs)
    assert (first - second).abs().max() > 1e-3
    module.eval()
    assert torch.equal(module(*inputs), module(*inputs))
    (gradient,) = torch.autograd.grad(module(*inputs).square().sum(), [module.sigma])
    assert (gradient != 0).any(), "sigma learns"


def test_the_state_of_a_source_is_for_evaluation_alone():
    """In training, the next call would have other directions."""
    module, (q, k, v) = build_attention("rfa", num_heads=H, head_dim=D, features=6).double(), qkv(9, d=D)
    state = module.eval().source_state(k, v)
    module.train()
    for call in (lambda: module.source_state(k, v), lambda: module.attend_source(q, state)):
        with refused("training", "True", "evaluation, or forward"):
            call()
