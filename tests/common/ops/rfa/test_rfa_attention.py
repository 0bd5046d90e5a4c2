"""Random feature attention beyond the contract: its kernel, its gate, its floor, its directions."""

import pytest
import torch
from torch.nn import functional as F

from common.attention import build_attention
from common.ops import rfa_attention
from tests.common.inputs import qkv
from tests.common.refusals import refused
from tests.compare import assert_close

H, D = 2, 4


def directions(count: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(H, count, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_it_estimates_attention_with_a_gaussian_kernel(causal):
    with torch.no_grad():
        q, k, v = qkv(11, d=D, e=3)
        out = rfa_attention(q, k, v, directions(60_000), causal=causal, floor=1e-6)
        distances = torch.cdist(F.normalize(q, dim=-1), F.normalize(k, dim=-1))
        weights = torch.exp(-distances.square() / 2)
        weights = weights.tril() if causal else weights
        assert_close("out", out, weights / weights.sum(-1, keepdim=True) @ v, 0.03)


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
