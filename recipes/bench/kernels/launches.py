"""Calls of the mechanisms that have kernels, and the launches of a call.

Launches are recorded instead of executed, so that no GPU is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from common.ops.flow.causal import CausalInputs
from common.ops.flow.gpu.causal import causal_attention
from common.ops.flow.options import flow_options
from common.ops.mixed_chunk.gpu.sequence import whole_sequence
from common.ops.mixed_chunk.sequence import MixedChunkOptions, Tokens

CHUNK = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_SIZES = (32, 64, 128)

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Sizes(NamedTuple):
    """Tensors of a call, as in a language model."""

    dtype: torch.dtype
    channels: int  # of a head
    batch: int = 2
    heads: int = 4
    tokens: int = 1024
    padded: bool = True

    @property
    def padding(self) -> Tensor | None:
        """A mask (B, n), True = padding, all False; None if not ``padded``."""
        return torch.zeros(self.batch, self.tokens, dtype=torch.bool) if self.padded else None


class Call(NamedTuple):
    """A mechanism and its inputs, which all require gradients."""

    attend: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    #: The least operations per token and head, however the work is split: forward, and backward.
    products: tuple[int, int]


class Launch(NamedTuple):
    """A kernel and the arguments that it is compiled for."""

    function: Any  # Triton's JITFunction
    signature: dict[str, str]  # Triton's type of each argument, "constexpr" for constants
    constants: dict[str, Any]
    divisible: tuple[int, ...]  # indices of the arguments divisible by 16, as Triton assumes when it compiles


def of_flow_attention(sizes: Sizes) -> Call:
    """Causal Flow-Attention with d = e and the default options."""

    def attend(*qkv: Tensor) -> Tensor:
        return causal_attention(CausalInputs(*qkv, sizes.padding, flow_options(), 64, None))[0]

    return Call(attend, _leaves(sizes, *[sizes.channels] * 3), _products(sizes.channels, sizes.channels, 0))


def of_mixed_chunk_attention(sizes: Sizes) -> Call:
    """FLASH's causal attention with e = 4 s and a bias by distance, as when heads and columns fill a GPU."""
    s, e = sizes.channels, 4 * sizes.channels
    bias = torch.zeros(2 * CHUNK - 1, requires_grad=True)

    def attend(*inputs: Tensor) -> Tensor:
        *tokens, bias = inputs
        options = MixedChunkOptions(CHUNK, causal=True)
        return whole_sequence(Tokens(*tokens), bias, options, sizes.padding, program_per_head=True)

    return Call(attend, (*_leaves(sizes, s, s, s, s, e), bias), _products(s, e, CHUNK))


#: Mechanism -> its call.
MECHANISMS: dict[str, Callable[[Sizes], Call]] = {
    "flow": of_flow_attention,
    "mixed_chunk": of_mixed_chunk_attention,
}


def kernel_modules() -> dict[str, ModuleType]:
    """The file of kernels of each mechanism. They import Triton."""
    from common.ops.flow.gpu import chunks_kernels
    from common.ops.mixed_chunk.gpu import kernels

    return {"flow": chunks_kernels, "mixed_chunk": kernels}


def kernels_of(module: ModuleType) -> dict[str, Any]:
    """The kernels of a file by name, without the functions that they call."""
    functions = {name: getattr(x, "kernel", x) for name, x in vars(module).items() if name[0] != "_"}
    return {name: x for name, x in functions.items() if hasattr(x, "arg_names") and x.fn.__module__ == module.__name__}


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record kernels instead of launching them, once per compiled variant; their outputs are uninitialized memory."""
    launches: dict[str, Launch] = {}
    with ExitStack() as stack:
        for module in kernel_modules().values():
            for name, function in kernels_of(module).items():
                stack.enter_context(patch.object(module, name, _Recorder(function, launches)))
        recorded_launches: list[Launch] = []
        yield recorded_launches
        recorded_launches += launches.values()


def launches_of(call: Call) -> list[Launch]:
    """The launches of kernels in forward and backward of a call, recorded by ``recorded``."""
    with recorded() as recorded_launches:
        call.attend(*call.inputs).sum().backward()
    return recorded_launches


def _leaves(sizes: Sizes, *channels: int) -> tuple[Tensor, ...]:
    shape = sizes.batch, sizes.heads, sizes.tokens
    return tuple(torch.zeros(*shape, size, dtype=sizes.dtype, requires_grad=True) for size in channels)


def _products(d: int, e: int, chunk: int) -> tuple[int, int]:
    """The least operations of causal linear attention, and of scores inside a chunk.

    For each token kᵀ v is added to a sum, and q reads it, 2 d e operations each. The backward pass forms this sum and
    that of the gradients, and three gradients read one of them. Inside a chunk a token meets C / 2 keys on average, in
    q kᵀ and in weights times v; backward in q kᵀ, in the gradients of q and k, and in those of weights and v.
    """
    return 4 * d * e + chunk * (d + e), 10 * d * e + chunk * (3 * d + 2 * e)


class _Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, function: Any, launches: dict[str, Launch]) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        values = dict(zip(self.function.arg_names, args), **kwargs)
        # Triton compiles the number 1 as a constant.
        constants = {p.name: values[p.name] for p in self.function.params if p.is_constexpr or _is_one(values[p.name])}
        signature = {name: "constexpr" if name in constants else _type_of(x) for name, x in values.items()}
        divisible = (i for i, name in enumerate(self.function.arg_names) if name not in constants)
        divisible = tuple(i for i in divisible if _is_divisible(values[self.function.arg_names[i]]))
        launch = Launch(self.function, signature, constants, divisible)
        self.launches[str((self.function.__name__, *launch[1:]))] = launch


def _is_one(x: Any) -> bool:
    return type(x) is int and x == 1


def _is_divisible(x: Any) -> bool:
    return isinstance(x, Tensor) or (type(x) is int and x % 16 == 0)


def _type_of(x: Any) -> str:
    return _TYPES[x.dtype] if isinstance(x, Tensor) else "fp32" if isinstance(x, float) else "i32"
