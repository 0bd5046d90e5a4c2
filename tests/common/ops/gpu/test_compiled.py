"""Every kernel compiles to GPU machine code, without a GPU, and fits its shared memory and registers.

The interpreter runs code that the compiler refuses, such as a variable that changes its shape in a loop. Any version
of Triton must compile every kernel into the available shared memory. The number of registers, and so whether a
thread spills, depends on the version: it is only checked for the version that the table was made with.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from common.ops.flow.causal import CausalInputs
from common.ops.flow.options import flow_options
from common.ops.mixed_chunk.sequence import MixedChunkOptions, Tokens
from common.ops.shared.gpu.launch import configuration, interpreted, warps_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone; there its absence is an error"),
    pytest.mark.skipif(interpreted(), reason="in the interpreter, nothing is compiled"),
]

TABLE = Path(__file__).parents[4] / "common/ops/shared/gpu/compiled.md"
SMALLEST_SHARED_MEMORY = 99 * 1024  # shared memory in bytes for a program on devices of compute capability 8.6 and 8.9
#: For products in the flow kernels, which are used in exponents; other products have operands of the inputs' dtype.
OPERANDS = {"flows": {"f32"}, "flows_backward": {"f32"}}
OPERANDS.update({name: set() for name in ("feature_sums", "sums_so_far", "weights", "weights_backward")})
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TYPES |= {torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", float: "fp32", int: "i32", bool: "i32"}


class Launch(NamedTuple):
    """A kernel and what it is compiled for."""

    function: Any  # Triton's JITFunction
    warps: int
    signature: dict[str, str]  # Triton's type of each argument, "constexpr" for constants
    constants: dict[str, Any]
    divisible: tuple[int, ...]  # indices of the arguments divisible by 16, as Triton assumes when it compiles


class Recorder:
    """Stands in the place of a kernel and records its launches."""

    def __init__(self, function: Any, warps: int, launches: dict[str, Launch]) -> None:
        self.kernel, self.warps, self.launches = function, warps, launches

    def __getitem__(self, grid: tuple[int, ...]):
        return self.record

    def record(self, *args: Any, **kwargs: Any) -> None:
        function, values = self.kernel, dict(zip(self.kernel.arg_names, args), **kwargs)
        # Triton compiles the number 1 as a constant.
        one = {name for name, x in values.items() if type(x) is int and x == 1}
        constants = {p.name: values[p.name] for p in function.params if p.is_constexpr or p.name in one}
        types = {name: x.dtype if isinstance(x, Tensor) else type(x) for name, x in values.items()}
        signature = {name: "constexpr" if name in constants else TYPES[kind] for name, kind in types.items()}
        divisible = tuple(
            i
            for i, name in enumerate(function.arg_names)
            if name not in constants and (isinstance(x := values[name], Tensor) or (type(x) is int and x % 16 == 0))
        )
        launch = Launch(function, self.warps, signature, constants, divisible)
        self.launches[str((function.__name__, *launch[2:]))] = launch


@pytest.fixture
def launches(monkeypatch, tmp_path) -> dict[str, dict[str, Launch]]:
    """Kernels are recorded instead of launched, by mechanism, each variant once; outputs are uninitialised memory."""
    from common.ops.flow.gpu import chunks_kernels
    from common.ops.mixed_chunk.gpu import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = {"flow": {}, "mixed_chunk": {}}
    for module, seen in zip((chunks_kernels, kernels), launches.values()):
        for name, function in kernels_of(module).items():
            recorder = Recorder(function, warps_of[f"{module.__name__}.{name}"], seen)
            monkeypatch.setattr(module, name, recorder)
    return launches


def kernels_of(module) -> dict[str, Any]:
    """The kernels of a file by name, without the functions that they call."""
    functions = {name: getattr(x, "kernel", x) for name, x in vars(module).items() if name[0] != "_"}
    return {name: x for name, x in functions.items() if hasattr(x, "arg_names") and x.fn.__module__ == module.__name__}


def compiled_for(launch: Launch) -> Any:
    """Triton's CompiledKernel for an A100; takes seconds for the largest."""
    from triton.backends import compiler
    from triton.compiler import ASTSource, compile

    if hasattr(compiler, "AttrsDescriptor"):  # version 3.2
        attributes = compiler.AttrsDescriptor.from_hints(dict.fromkeys(launch.divisible, 16))
    else:
        attributes = {(i,): [["tt.divisibility", 16]] for i in launch.divisible}
    source = ASTSource(launch.function, launch.signature, launch.constants, attributes)
    return compile(source, target=compiler.GPUTarget("cuda", 80, 32), options=configuration(launch.warps))


def assert_fits(compiled: Any, folder: Path, shared: int = SMALLEST_SHARED_MEMORY) -> int:
    """Check shared memory and, by cuobjdump ("REG:40 STACK:0 ..."), that nothing spills; the registers of a thread."""
    import triton.backends.nvidia

    tool, file = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump", folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    report = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", report.stdout)}
    assert compiled.metadata.shared <= shared, compiled.metadata
    # A thread's stack is what did not fit registers, for which alone kernels use it.
    assert not of_the_table() or not usage["STACK"], (compiled.metadata, usage)
    return usage["REG"]


def of_the_table() -> bool:
    """Whether the installed Triton is the version that the table was made with."""
    return f"; triton {metadata.version('triton')}\n" in TABLE.read_text()


def assert_compile(launches, kernels, folder) -> None:
    """Each kernel, with products of operands of the right dtype."""
    assert {launch.function.__name__ for launch in launches.values()} == set(kernels)
    for launch in launches.values():
        name, compiled = launch.function.__name__, compiled_for(launch)
        assert_fits(compiled, folder)
        operands = set(re.findall(r"tt\.dot .* : tensor<[x\d]*x(\w+)> \* tensor<[x\d]*x(\w+)>", compiled.asm["ttir"]))
        wanted = OPERANDS.get(name, {next(iter(launch.signature.values())).strip("*").replace("fp", "f")})
        assert operands == {(dtype, dtype) for dtype in wanted}, name


def leaves(dtype, *channels, heads=3, n=70):
    return [torch.zeros(2, heads, n, size, dtype=dtype, requires_grad=True) for size in channels]


def run_flow(inputs, n, **options) -> None:
    from common.ops.flow.gpu.causal import causal_attention

    mask = torch.zeros(2, n, dtype=torch.bool)
    causal_attention(CausalInputs(*inputs, mask, flow_options(**options), 64, None))[0].sum().backward()


def test_kernels_of_causal_flow_attention(launches, tmp_path):
    """Tiles of 64 or 32 x 16 and x 32, all different so that they cannot be confused."""
    from common.ops.flow.gpu import chunks_kernels

    run_flow(leaves(torch.bfloat16, 10, 10, 20), 70, phi="relu")
    assert_compile(launches["flow"], kernels_of(chunks_kernels), tmp_path)


@pytest.mark.parametrize(
    "dtype, causal, kernel, bias",
    [(torch.float16, True, "relu2", (3, 127)), (torch.float32, False, "laplace", (64, 64))],
    ids=str,
)
def test_kernels_of_mixed_chunk_attention(dtype, causal, kernel, bias, launches, tmp_path):
    """Tiles of 64 x 64 and x 16, backward of 32; in float32 of 32 x 16 and x 32, backward of 16 x 16 and x 64."""
    from common.ops.mixed_chunk.gpu import kernels
    from common.ops.mixed_chunk.gpu.sequence import whole_sequence

    s, e = (40, 10) if causal else (10, 80)
    bias, options = torch.zeros(bias, requires_grad=True), MixedChunkOptions(64, causal, kernel)
    whole_sequence(Tokens(*leaves(dtype, s, s, s, s, e)), bias, options, None).sum().backward()
    assert_compile(launches["mixed_chunk"], kernels_of(kernels), tmp_path)


def test_a_kernel_that_needs_all_registers(launches, tmp_path):
    """``features_backward`` previously spilled 24 bytes with the table's version of Triton."""
    run_flow(leaves(torch.float16, 64, 64, 64, heads=4, n=1024), 1024)
    (launch,) = (x for x in launches["flow"].values() if x.function.__name__ == "features_backward")
    registers = assert_fits(compiled_for(launch), tmp_path, 163 * 1024)  # what a program may have on an A100
    assert not of_the_table() or registers > 200
