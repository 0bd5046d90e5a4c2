"""FAVOR+ beyond the contract: its estimate, its directions, extreme inputs, and comparison with performer-pytorch."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.attention import build_attention
from common.ops import favor_attention
from common.ops.favor import LENGTHS, draw_directions
from tests.common.inputs import qkv
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def error(q, k, v, directions, causal: bool) -> float:
    """Relative error of attention with ``directions`` against softmax attention."""
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out = favor_attention(q, k, v, directions.to(q.dtype), causal=causal)
    return ((out - expected).norm() / expected.norm()).item()


def by_logarithms(q, k, v, directions):
    """The paper's formula from logarithms of all weights, since its features may be too large for float64."""
    q, k = (x * x.shape[-1] ** -0.25 for x in (q, k))
    of_queries, of_keys = (x @ directions.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
    weights = (of_queries.unsqueeze(3) + of_keys.unsqueeze(2)).logsumexp(-1)  # (B, H, n, m)
    return weights.softmax(-1) @ v


@causality
def test_it_estimates_softmax_attention(causal):
    """Sixteen times as many directions give a quarter of the error."""
    with torch.no_grad():
        inputs = qkv(23, d=8, e=4, scale=0.4)
        few, many = (error(*inputs, draw_directions(r, 8, "gaussian", seeded()), causal) for r in (512, 8192))
    assert many < 0.02 and 2.0 < few / many < 8.0


def test_orthogonal_directions_have_the_smaller_error():
    """Theorem 2 of the paper, averaged over many draws of eight directions each."""
    with torch.no_grad():
        inputs, generator = qkv(9, d=8, e=4, scale=0.7), seeded(1)
        orthogonal = [error(*inputs, draw_directions(8, 8, "gaussian", generator), False) for _ in range(300)]
        independent = [error(*inputs, torch.randn(8, 8, generator=generator), False) for _ in range(300)]
    assert sum(orthogonal) < 0.95 * sum(independent)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_directions_are_orthogonal_in_blocks(lengths):
    directions = draw_directions(11, 4, lengths, seeded()).double()
    for block in directions.split(4):
        products = block @ block.T
        assert_close("products", products, torch.diag(products.diagonal()), 1e-6)
    squares = draw_directions(4000, 4, lengths, seeded()).square().sum(1)
    # A squared length has mean d and variance 2d, the variance for a Gaussian vector.
    assert abs(squares.mean() - 4.0) < 0.2 and abs(squares.var() - (8.0 if lengths == "gaussian" else 0.0)) < 1.0


@causality
def test_large_keys_and_queries_stay_finite_and_leave_the_past_alone(causal):
    """The authors' features would overflow here, or an earlier token's own key would be lost to a later one."""
    directions = draw_directions(16, 8, "gaussian", seeded())
    q, k, v = (x.detach() for x in qkv(20, d=8, dtype=torch.float32, scale=1.0))
    before = favor_attention(q, k, v, directions, causal=causal)
    q[:, :, 12:], k[:, :, 12:] = 300.0 * q[:, :, 12:], 300.0 * k[:, :, 12:]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = favor_attention(*leaves, directions, causal=causal, chunk_size=8)
    assert torch.isfinite(out).all() and all(torch.isfinite(x).all() for x in gradients(out, leaves))
    if causal:
        assert_close("the past", out[:, :, :12], before[:, :, :12])


@causality
@pytest.mark.parametrize("scale", [10.0, 15.0, 20.0, 30.0, 60.0])
def test_queries_far_from_all_keys_have_finite_gradients(causal, scale):
    """The weights of all their keys are negligible relative to the largest, and gradients divide by them."""
    directions, generator = draw_directions(64, 16, "gaussian", seeded()), seeded(1)
    for _ in range(10):
        q, k, v = (torch.randn(1, 2, 9, 16, generator=generator) for _ in range(3))
        leaves = [x.requires_grad_() for x in (scale * q, scale * k, v)]
        out = favor_attention(*leaves, directions, causal=causal)
        assert all(x.isfinite().all() for x in (out, *gradients(out.square(), leaves)))
        if not causal:
            assert_close(
                "output", out.double(), by_logarithms(*(x.detach().double() for x in leaves), directions), 1e-3
            )


def test_training_draws_directions_again_every_so_many_passes():
    """Evaluation keeps its directions, so that averaged weights share one set of directions."""
    module = build_attention("favor", head_dim=4, features=6, redraw=3).train()
    inputs, before = qkv(5, d=4, dtype=torch.float32), module.directions.clone()
    trained = [module(*inputs) for _ in range(7)]
    same = [torch.equal(a, b) for a, b in zip(trained, trained[1:])]
    assert same == [True, False, True, True, False, True]
    evaluated = module.eval()(*inputs)
    assert torch.equal(evaluated, trained[0]) and torch.equal(module.directions, before)
    fresh = build_attention("favor", head_dim=4, features=6)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(*inputs), evaluated)


@pytest.mark.parametrize("redraw", [None, 3])
def test_directions_are_drawn_again_on_request(redraw):
    """By a seed always the same ones; in training too, before its own first draw."""
    module, inputs = build_attention("favor", head_dim=4, features=6, redraw=redraw), qkv(5, d=4, dtype=torch.float32)
    drawn, outputs = [module.directions.clone()], []
    for seed in (None, 5, 5):
        module.redraw_directions(seed)
        drawn.append(module.directions.clone())
        outputs.append([module.train(training)(*inputs) for training in (False, True)])
    assert [torch.equal(a, b) for a, b in zip(drawn, drawn[1:])] == [False, False, True]
    assert all(torch.equal(*pair) for pair in outputs[:2]) and not torch.equal(outputs[0][0], outputs[1][0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_pass_that_checkpointing_repeats_has_its_directions(use_reentrant):
    """With new directions in every pass, gradients equal those of the same passes without checkpointing."""
    results = []
    for wrapped in (False, True):
        torch.manual_seed(2)
        module = build_attention("favor", head_dim=4, features=6, redraw=1).train()
        inputs = qkv(5, d=4, dtype=torch.float32)
        for _ in range(2):
            out = checkpoint(module, *inputs, use_reentrant=use_reentrant) if wrapped else module(*inputs)
            out.square().sum().backward()  # reentrant checkpointing supports only this
        results.append([x.grad for x in inputs])
    for plain, repeated in zip(*results):
        assert_close("gradient", repeated, plain)


@pytest.fixture
def performer():
    """performer-pytorch, of the extra ``bench``."""
    return pytest.importorskip("performer_pytorch.performer_pytorch")


def test_the_kernel_is_that_of_performer_pytorch_without_its_epsilon(performer):
    q, k, v = (x.detach() for x in qkv(21, d=8, e=4))
    directions = draw_directions(16, 8, "gaussian", seeded()).double()

    def theirs(eps: float):
        options = {"projection_matrix": directions, "eps": eps}
        features = [performer.softmax_kernel(x, is_query=x is q, **options) for x in (q, k)]
        return performer.linear_attention(*features, v)

    out = favor_attention(q, k, v, directions)
    assert_close("without epsilon", theirs(0.0), out)
    difference = (theirs(1e-4) - out).norm() / out.norm()
    assert 1e-5 < difference < 0.05, "their default adds 1e-4 to every feature"


def test_causal_performer_pytorch_depends_on_the_future(performer):
    """performer-pytorch's key stabiliser is a maximum over all positions and scales its epsilon; ours has none."""
    q, k, v = (x.detach() for x in qkv(12, d=8, e=8, dtype=torch.float32))
    module = performer.FastAttention(8, nb_features=16, causal=True)
    later = k.clone()
    later[:, :, 6:] *= 6.0

    def theirs(keys):
        features = [
            performer.softmax_kernel(x, projection_matrix=module.projection_matrix, is_query=x is q) for x in (q, keys)
        ]
        return performer.causal_linear_attention_noncuda(*features, v)

    def ours(keys):
        return favor_attention(q, keys, v, module.projection_matrix, causal=True)

    leak, our_leak = ((f(later) - f(k))[:, :, :6].norm() / f(k)[:, :, :6].norm() for f in (theirs, ours))
    assert leak > 1e-3 and our_leak < 1e-6
