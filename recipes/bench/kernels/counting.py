"""Launches, bytes and operations of kernels in Triton's interpreter, and of PyTorch's operations between them."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The name under which PyTorch's operations are added up.
PYTORCH = "PyTorch"

_ALLOCATES = re.compile(r"(new_)?empty")
#: Operations whose first argument is written, or only gives a shape.
_READS_NOT_THE_FIRST = re.compile(r"copy_|fill_|zero_|new_\w+|\w+_like")


@dataclass
class Work:
    """Work of all launches of a kernel: bytes moved and operations of products."""

    launches: int = 0
    bytes: int = 0  # of loads and stores that are not masked
    bytes_once: int = 0  # bytes where each address counts once per launch for loads, and once for stores
    half: int = 0  # operations of products in float16
    tf32: int = 0  # in TF32; a float32 product in three parts counts three times

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@contextmanager
def counted() -> Iterator[dict[str, Work]]:
    """Add up the work of kernels, by name, and of PyTorch's operations; for CPU tensors and Triton's interpreter.

    An operation of PyTorch counts as one launch that reads its inputs and writes its outputs once; views do not count.
    """
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    count = _Count()
    run, builder = GridExecutor.__call__, interpreter_builder
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with count.launch(executor.fn.__name__):
            return run(executor, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", launch))
        for name, function, note in (
            ("create_masked_load", load, lambda pointers, mask, *_: count.moved("load", pointers, mask)),
            ("create_masked_store", store, lambda pointers, values, mask, *_: count.moved("store", pointers, mask)),
            ("create_dot", dot, lambda a, b, total, precision, *_: count.multiplied(a, b, precision)),
        ):
            stack.enter_context(patch.object(builder, name, _after(note, function)))
        for name in ("create_atomic_rmw", "create_atomic_cas", "create_dot_scaled"):
            if hasattr(builder, name):  # Triton 3.2 has no scaled products
                stack.enter_context(patch.object(builder, name, _refused(name)))
        stack.enter_context(count)
        yield count.work


def _after(note: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, *kwargs.values())
        return function(*args, **kwargs)

    return noted


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} of Triton's interpreter is not counted")

    return refuse


class _Count(TorchDispatchMode):
    """The sums, and PyTorch's operations as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[str, Work] = {}
        self.kernel: Work | None = None  # the kernel that runs
        self.addresses: dict[tuple[str, int], list[np.ndarray]] = {}  # "load" or "store", and bytes of a number

    @contextmanager
    def launch(self, name: str) -> Iterator[None]:
        self.kernel = self.work.setdefault(name, Work())
        self.kernel.launches += 1
        try:
            yield
        finally:
            for (_, size), pointers in self.addresses.items():
                self.kernel.bytes_once += size * np.unique(np.concatenate(pointers)).size
            self.addresses.clear()
            self.kernel = None

    def moved(self, direction: str, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data[mask.data]
        self.kernel.bytes += size * addresses.size
        self.addresses.setdefault((direction, size), []).append(addresses)

    def multiplied(self, a: Any, b: Any, precision: Any) -> None:
        operations = 2 * a.data.size * b.data.shape[-1]
        if a.data.itemsize == 2:
            self.kernel.half += operations
        else:
            self.kernel.tf32 += operations * {"TF32": 1, "TF32x3": 3}[precision.name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self.kernel is None:  # operations inside the interpreter do not count
            self._called(func, _tensors((args, kwargs)), _tensors(outputs))
        return outputs

    def _called(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        storages = {_storage(x) for x in inputs}
        # A view has the storage of an input, and writes nothing.
        written = [x for x in outputs if func._schema.is_mutable or _storage(x) not in storages]
        if not written or _ALLOCATES.match(name):
            return
        read = inputs[1:] if _READS_NOT_THE_FIRST.fullmatch(name) else inputs
        size = sum(map(_bytes, (*read, *written)))
        self.work[PYTORCH] = self.work.get(PYTORCH, Work()) + Work(1, size, size)


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _bytes(x: Tensor) -> int:
    """Bytes of the elements of a tensor; an element repeated by a stride of 0 counts once."""
    return x.element_size() * math.prod(size for size, stride in zip(x.shape, x.stride()) if stride)
