"""The launches of a call's kernels: recorded instead of launched, so that no GPU is needed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from common.ops.flow.causal import CausalInputs
from common.ops.flow.causal_gpu import causal_attention
from common.ops.flow.options import flow_options
from common.ops.mixed_chunk.gpu import whole_sequence
from common.ops.mixed_chunk.sequence import Tokens, mixed_chunk_options

#: Tensors of a call: batch, heads and tokens, of a language model.
BATCH, HEADS, TOKENS = 2, 4, 1024
CHUNK = 256

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


class Launch(NamedTuple):
    """A kernel and what it is compiled for."""

    function: Any  # Triton's JITFunction
    signature: dict[str, str]  # Triton's type of each argument, "constexpr" for constants
    constants: dict[str, Any]
    divisible: tuple[int, ...]  # numbers of the arguments that 16 divides, as Triton assumes when it compiles


def kernel_modules() -> tuple[ModuleType, ModuleType]:
    """The files of kernels. They import Triton."""
    from common.ops.flow import causal_gpu_kernels
    from common.ops.mixed_chunk import gpu_kernels

    return causal_gpu_kernels, gpu_kernels


def kernels_of(module: ModuleType) -> dict[str, Any]:
    """The kernels of a file by name, tuned or not, without the functions that they call."""
    found = {name: x.fn if hasattr(x, "configs") else x for name, x in vars(module).items() if name[0] != "_"}
    return {name: x for name, x in found.items() if hasattr(x, "arg_names") and x.fn.__module__ == module.__name__}


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Kernels are not launched but noted, once for all that each is compiled for; their outputs are unset memory."""
    launches: dict[str, Launch] = {}
    with ExitStack() as stack:
        for module in kernel_modules():
            for name, function in kernels_of(module).items():
                stack.enter_context(patch.object(module, name, _Recorder(function, launches)))
        found: list[Launch] = []
        yield found
        found += launches.values()


def of_flow_attention(dtype: torch.dtype, channels: int) -> list[Launch]:
    """Forward and backward of causal Flow-Attention with padding and d = e = ``channels``."""
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    inputs = _leaves(dtype, channels, channels, channels)
    return _recorded(lambda: causal_attention(CausalInputs(*inputs, mask, flow_options(), 64, None))[0])


def of_mixed_chunk_attention(dtype: torch.dtype, channels: int) -> list[Launch]:
    """Forward and backward of FLASH's causal attention with s = ``channels``, e = 4 s and a bias by distance."""
    bias = torch.zeros(2 * CHUNK - 1, requires_grad=True)
    tokens = Tokens(*_leaves(dtype, *[channels] * 4, 4 * channels))
    return _recorded(lambda: whole_sequence(tokens, bias, mixed_chunk_options(CHUNK, causal=True), None))


#: Mechanism -> its launches for a dtype and a head size.
MECHANISMS: dict[str, Callable[[torch.dtype, int], list[Launch]]] = {
    "flow": of_flow_attention,
    "mixed_chunk": of_mixed_chunk_attention,
}


def _leaves(dtype: torch.dtype, *channels: int) -> list[Tensor]:
    return [torch.zeros(BATCH, HEADS, TOKENS, size, dtype=dtype, requires_grad=True) for size in channels]


def _recorded(call: Callable[[], Tensor]) -> list[Launch]:
    with recorded() as found:
        call().sum().backward()
    return found


class _Recorder:
    """Takes the place of a kernel."""

    def __init__(self, function: Any, launches: dict[str, Launch]) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(self.function.arg_names, args), **kwargs)
        # Triton makes a constant of the number 1.
        constants = {p.name: given[p.name] for p in self.function.params if p.is_constexpr or _is_one(given[p.name])}
        signature = {name: "constexpr" if name in constants else _type_of(x) for name, x in given.items()}
        divisible = (i for i, name in enumerate(self.function.arg_names) if name not in constants)
        divisible = tuple(i for i in divisible if _is_divisible(given[self.function.arg_names[i]]))
        launch = Launch(self.function, signature, constants, divisible)
        self.launches[str((self.function.__name__, *launch[1:]))] = launch


def _is_one(x: Any) -> bool:
    return type(x) is int and x == 1


def _is_divisible(x: Any) -> bool:
    return isinstance(x, Tensor) or (type(x) is int and x % 16 == 0)


def _type_of(x: Any) -> str:
    return _TYPES[x.dtype] if isinstance(x, Tensor) else "fp32" if isinstance(x, float) else "i32"
