"""Kernels for GPUs recorded instead of launched, and compiled for a GPU that is not there."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from common.ops.shared.gpu.launch import configuration

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch(NamedTuple):
    """A kernel and the arguments that it is compiled for."""

    function: Any  # Triton's JITFunction
    signature: dict[str, str]  # Triton's type of each argument, "constexpr" for constants
    constants: dict[str, Any]
    divisible: tuple[int, ...]  # indices of the arguments divisible by 16, as Triton assumes when it compiles


class Resources(NamedTuple):
    """Shared memory and registers that a compiled kernel needs."""

    shared: int  # bytes of shared memory
    registers: int  # of a thread, at most 255
    spilled: int  # bytes of a thread that did not fit registers: its stack, which kernels use for nothing else


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


class _Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, function: Any, launches: dict[str, Launch]) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: tuple[int, ...]):
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


def compile_for(launch: Launch, capability: int, warps: int) -> Any:
    """Triton's CompiledKernel for a capability; takes seconds for the largest."""
    from triton.backends import compiler
    from triton.compiler import ASTSource, compile

    if hasattr(compiler, "AttrsDescriptor"):  # version 3.2
        attributes = compiler.AttrsDescriptor.from_hints(dict.fromkeys(launch.divisible, 16))
    else:
        attributes = {(i,): [["tt.divisibility", 16]] for i in launch.divisible}
    source = ASTSource(launch.function, launch.signature, launch.constants, attributes)
    return compile(source, target=compiler.GPUTarget("cuda", capability, 32), options=configuration(warps))


def resources(compiled: Any) -> Resources:
    """The resources of a compiled kernel, as Triton and cuobjdump ("REG:40 STACK:0 ...") report them."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", report.stdout)}
    return Resources(compiled.metadata.shared, usage["REG"], usage["STACK"])


def _is_one(x: Any) -> bool:
    return type(x) is int and x == 1


def _is_divisible(x: Any) -> bool:
    return isinstance(x, Tensor) or (type(x) is int and x % 16 == 0)


def _type_of(x: Any) -> str:
    return _TYPES[x.dtype] if isinstance(x, Tensor) else "fp32" if isinstance(x, float) else "i32"
