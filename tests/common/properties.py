"""Promises of every operation that takes a padding mask."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compare import assert_close, gradients


class Elements(TorchDispatchMode):
    """Counts the elements of all tensors created inside the context, in ``total``."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += sum(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor))
        return out


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor created inside the context, in ``numel``."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors)])
        return out


def bytes_kept(call: Callable[[], Tensor]) -> int:
    """The bytes that the graph of ``call()`` saves for its backward pass."""
    storages = {}

    def remember(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()  # kept alive, so that no address is reused
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        assert call().requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def largest_tensor(call: Callable[[], object]) -> int:
    """The number of elements of the largest tensor that ``call()`` creates."""
    with LargestTensor() as seen:
        call()
    return seen.numel


def assert_prefixes_stand_alone(op: Callable[..., Tensor], inputs: Sequence[Tensor], lengths: Sequence[int]) -> None:
    """Check that the first t outputs of ``op(*inputs)``, (B, H, n, ...) each, do not depend on later tokens."""
    whole = op(*inputs)
    for t in lengths:
        alone = op(*(x[:, :, :t] for x in inputs))
        assert_close(f"the first {t}", whole[:, :, :t], alone, 1e-12)
        changed = [torch.cat([x[:, :, :t], 100 * torch.randn_like(x[:, :, t:])], dim=2) for x in inputs]
        assert_close(f"the first {t}", op(*changed)[:, :, :t], alone, 1e-12)


def assert_padding_never_leaks(
    op: Callable[..., Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor], mask: Tensor, poison: float
) -> None:
    """Check that ``poison`` in the padding of ``mask`` (B, n) changes no bit of outputs, or gradients of ``leaves``.

    The first row of ``mask`` is entirely padding, and its output is 0.
    """
    poisoned = [x.detach().masked_fill(mask[:, None, :, None], poison).requires_grad_() for x in inputs]
    out, expected = op(*poisoned, key_padding_mask=mask), op(*inputs, key_padding_mask=mask)
    assert torch.equal(out, expected)
    assert (out[0] == 0).all()
    for actual, wanted in zip(gradients(out, [*poisoned, *leaves]), gradients(expected, [*inputs, *leaves])):
        assert torch.equal(actual, wanted) and torch.isfinite(actual).all()
