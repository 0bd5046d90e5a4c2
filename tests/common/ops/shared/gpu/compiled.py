"""Shared memory, registers and spilled bytes of kernels: the compiler's own report, for a GPU that is not there."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common.ops.shared.gpu.launch import configuration

from .launches import Launch


class Resources(NamedTuple):
    """Shared memory and registers that a compiled kernel needs."""

    shared: int  # bytes of shared memory
    registers: int  # of a thread, at most 255
    spilled: int  # bytes of a thread that did not fit registers: its stack, which kernels use for nothing else


def compile_for(launch: Launch, capability: int, warps: int) -> Any:
    """Triton's CompiledKernel for a capability; takes seconds for the largest."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    source = ASTSource(launch.function, launch.signature, launch.constants, _attributes(launch))
    return compile(source, target=GPUTarget("cuda", capability, 32), options=configuration(warps))


def resources(compiled: Any) -> Resources:
    """The resources of a compiled kernel, as Triton and cuobjdump report them."""
    usage = _report(compiled.asm["cubin"])
    return Resources(compiled.metadata.shared, usage["REG"], usage["STACK"])


def _attributes(launch: Launch) -> Any:
    """The arguments divisible by 16, in Triton's form: a dictionary, or in version 3.2 an object."""
    from triton.backends import compiler

    if hasattr(compiler, "AttrsDescriptor"):
        return compiler.AttrsDescriptor.from_hints(dict.fromkeys(launch.divisible, 16))
    return {(i,): [["tt.divisibility", 16]] for i in launch.divisible}


def _report(cubin: bytes) -> dict[str, int]:
    """cuobjdump's "REG:40 STACK:0 ..." of a file with one kernel."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", report.stdout)}
