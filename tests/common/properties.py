"""How many elements a call creates, how large the largest tensor is, and how many bytes it keeps."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
