"""Running sums that forget: the literal recurrence, its gradients and second derivatives."""

import warnings

import pytest
import torch

from common.ops.shared.decayed_cumsum import decayed_cumsum
from tests.compare import assert_close


def literal(x, log_decay, initial):
    last, sums = torch.zeros_like(x[:, :, 0]) if initial is None else initial, []
    for t in range(x.shape[2]):
        last = last * log_decay[:, :, t].exp() + x[:, :, t]
        sums.append(last)
    return torch.stack(sums, dim=2)


def inputs(length, own_gates, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, 2, length, 3, generator=generator, dtype=dtype)
    # Near nothing, near all, and between.
    log_decay = -(torch.rand(2, 2, length, 3 if own_gates else 1, generator=generator, dtype=dtype) ** 20) * 50.0
    initial = torch.randn(2, 2, 3, generator=generator, dtype=dtype)
    return [y.requires_grad_() for y in (x, log_decay, initial)]


@pytest.mark.parametrize("own_gates", [False, True])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 300])
def test_sums_and_gradients_of_the_recurrence(length, own_gates):
    tensors = inputs(length, own_gates)
    for initial in (tensors[2], None):
        leaves = tensors if initial is not None else tensors[:2]
        out, expected = decayed_cumsum(*tensors[:2], initial), literal(*tensors[:2], initial)
        assert_close("sums", out, expected)
        grads, wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected))
        for name, grad, want in zip(("x", "log_decay", "initial"), grads, wanted):
            assert_close(name, grad, want)


def test_sums_of_thousands_of_tokens_in_single_precision():
    tensors = inputs(4096, own_gates=True)
    single = [x.detach().float() for x in tensors]
    assert_close("sums", decayed_cumsum(*single), literal(*tensors), 1e-5)


@pytest.mark.parametrize("own_gates", [False, True])
def test_gradients_of_gradients_and_batches_of_them(own_gates):
    tensors = inputs(19, own_gates)
    assert torch.autograd.gradgradcheck(decayed_cumsum, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about operations that it performs one by one
        assert torch.autograd.gradcheck(decayed_cumsum, tensors, check_batched_grad=True)
