"""The functions applied to scores: relu², softmax and the Laplace function."""

import math

import pytest
import torch

from common.ops.shared.score_kernels import SCORE_KERNELS, score_kernel
from tests.compare import assert_close, gradients

SCORES = torch.linspace(-3, 3, 61, dtype=torch.float64)


def test_relu2():
    assert_close("relu²", score_kernel(SCORES, "relu2", None), torch.where(SCORES > 0, SCORES**2, 0.0))


def test_laplace_is_one_half_at_its_mean_and_as_steep_as_relu2_there():
    """Mega's μ and σ are those for which the function and its slope meet relu² at x = μ."""
    mean = torch.tensor([math.sqrt(0.5)], dtype=torch.float64, requires_grad=True)
    weight = score_kernel(mean, "laplace", None)
    (slope,) = torch.autograd.grad(weight, mean)
    assert_close("value", weight, torch.tensor([0.5], dtype=torch.float64))
    assert_close("slope", slope, torch.tensor([math.sqrt(2.0)], dtype=torch.float64))


def test_laplace_is_the_normal_distribution_function():
    normal = torch.distributions.Normal(
        torch.tensor(0.5).double().sqrt(), (1 / torch.tensor(4 * math.pi).double()).sqrt()
    )
    assert_close("laplace", score_kernel(SCORES, "laplace", None), normal.cdf(SCORES), 1e-7)


def test_softmax_is_over_the_visible_entries_alone():
    scores, hidden = torch.randn(4, 7, dtype=torch.float64), torch.arange(7) > torch.arange(4)[:, None]
    weights = score_kernel(scores, "softmax", hidden)
    for i in range(4):
        assert_close("weights", weights[i, : i + 1], scores[i, : i + 1].softmax(0))
    assert (weights[hidden] == 0).all()
    assert_close("all visible", score_kernel(scores, "softmax", None), scores.softmax(-1))


@pytest.mark.parametrize("kernel", SCORE_KERNELS)
def test_what_is_hidden_weighs_nothing_and_gets_no_gradient(kernel):
    scores = torch.randn(5, 7, requires_grad=True)
    hidden = torch.rand(5, 7) < 0.5
    hidden[0], hidden[1] = True, False
    weights = score_kernel(scores, kernel, hidden)
    (gradient,) = gradients(weights, [scores])
    assert torch.isfinite(weights).all() and torch.isfinite(gradient).all()
    assert (weights[hidden] == 0).all() and (gradient[hidden] == 0).all()
    assert (weights[1] > 0).any() and (gradient[1] != 0).any()
