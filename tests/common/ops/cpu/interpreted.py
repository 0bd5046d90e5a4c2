"""A program that runs kernels as plain Python, without Numba, and prints those that ran.

Stand-ins take the place of the three modules with what only Numba understands. NumPy checks each index of an array, and
``load`` and ``store`` check each vector, which compiled kernels do not. Arrays have the sizes that kernels declare,
inside of the memory that kernels get: numbers around that must stay.
"""

import functools
import math
import sys
from types import ModuleType

import numpy as np

#: The kernels that have been called, as MODULE.NAME.
called: set[str] = set()


def kernel(function):
    """``function`` itself, which is noted when it is called."""

    @functools.wraps(function)
    def noted(*arguments):
        called.add(f"{function.__module__.removeprefix('common.ops.')}.{function.__name__}")
        with np.errstate(all="ignore"):
            return function(*arguments)

    return noted


def number(value, like):
    """``value`` in the type of ``like``."""
    return type(like)(value)


def array(address, begin, shape, like):
    """The numbers of a type after ``begin`` numbers at an address, as an array of a shape; without an address, none."""
    if address == 0:
        return np.empty(0, like.dtype)
    kind = np.ctypeslib.as_ctypes_type(like.dtype) * int(np.prod(shape))
    return np.frombuffer(kind.from_address(int(address + begin * like.itemsize)), like.dtype).reshape(shape)


def row(tensor, b, h, t, size, like):
    """The channels of a token of a tensor, which is its address and strides."""
    return array(tensor[0], b * tensor[1] + h * tensor[2] + t * tensor[3], size, like)


def width(like):
    """Numbers of a vector."""
    return 64 // like.itemsize


def _place(x, i, j):
    """The vector that begins at x[i, j], which must be inside of its row."""
    rows, columns = x.shape
    if not (0 <= i < rows and 0 <= j <= columns - width(x.dtype.type(0))):
        raise IndexError(f"the vector at {i}, {j} is not inside of {rows} rows of {columns}")
    return x[i, j : j + width(x.dtype.type(0))]


def store(x, i, j, vector):
    """Write a vector to x[i, j] and what follows."""
    _place(x, i, j)[:] = vector


_STAND_INS = {
    "compiler": {"inlined": lambda function: function, "kernel": kernel},
    "memory": {"array": array, "row": row, "number": number, "exp": lambda x: type(x)(math.exp(min(x, 88.0)))},
    "vectors": {
        "padded": lambda size: (size + 15) // 16 * 16,
        "width": width,
        "load": lambda x, i, j: _place(x, i, j).copy(),
        "store": store,
        "load_first": lambda x, j, count: np.pad(x[j : j + max(0, min(count, width(x)))], (0, width(x)))[: width(x)],
        "first": lambda x, count: np.where(np.arange(len(x)) < count, x, 0),
        "filled": lambda x: np.full(width(x), x),
        "times": lambda x, y: x * y,
        "plus": lambda x, y, z: x + y * z,
        "total": lambda x: x.sum(),
    },
}
for name, functions in _STAND_INS.items():
    module = ModuleType(f"common.ops.shared.cpu.{name}")
    vars(module).update(functions)
    sys.modules[module.__name__] = module


def main() -> None:
    """Call every function: parts after a state, steps, padding, and without gradients."""
    import torch

    from tests.common.inputs import padding
    from tests.common.ops.cpu.kernels import OPERATORS, ROWS, attend, draw, of_tokens

    new_empty, guards = torch.Tensor.new_empty, []

    def between_guards(like, *size, **options):
        if not like.is_floating_point():
            return new_empty(like, *size, **options)
        size = size if isinstance(size[0], int) else size[0]
        memory = new_empty(like, math.prod(size) + 64, **options).fill_(7.0)
        guards.extend([memory[:32], memory[-32:]])
        return memory[32:-32].view(size)

    torch.Tensor.new_empty = between_guards  # results, and the working memory of a kernel
    sizes = [(1, 1, 1), (3, 3, 17), (5, 16, 7), (9, 17, 2)]
    for i, (name, row) in enumerate(ROWS.items()):
        # More than a tile of 64 tokens, for a function of each operator.
        for n, d, e in [*sizes, (66, 2, 1)] if name in OPERATORS.values() else sizes:
            tensors = draw(name, n, d, e, batch=1)
            mask = padding("right", 1, n) if i % 2 and n == 9 else None
            masks = {"key_padding_mask": mask, "query_padding_mask": mask}
            if not row.causal:
                attend(name, tensors, **masks).sum().backward()
                continue
            out, state = attend(name, tensors, return_state=True, **masks)
            again, state = attend(name, tensors, initial_state=state, return_state=True, **masks)
            step, after = attend(name, of_tokens(tensors, slice(1)), initial_state=state, return_state=True)
            (out.sum() + again.sum() + step.sum() + sum(x.sum() for x in after.values())).backward()
            state = {entry: x.detach() for entry, x in state.items()}
            with torch.no_grad():
                attend(name, of_tokens(tensors, slice(1)), initial_state=state)
    assert len(guards) > 1000 and all((guard == 7.0).all() for guard in guards)
    print(*called)


if __name__ == "__main__":
    main()
