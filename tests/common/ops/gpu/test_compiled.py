"""Every kernel compiles to GPU machine code, without a GPU, and fits its shared memory and registers.

The interpreter runs code that the compiler refuses, such as a variable that changes its shape in a loop. Any version
of Triton must compile every kernel into the available shared memory. The number of registers, and so whether a
thread spills, depends on the version: it is only checked for the version that the table was made with.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from common.ops.flow.options import flow_options
from common.ops.mixed_chunk.sequence import MixedChunkOptions, Tokens
from common.ops.shared.gpu.launch import interpreted, warps_of
from tests.common.ops.gpu.launches import compile_for, kernel_modules, kernels_of, recorded, resources

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone; there its absence is an error"),
    pytest.mark.skipif(interpreted(), reason="in the interpreter, nothing is compiled"),
]

TABLE = Path(__file__).parents[4] / "common/ops/shared/gpu/compiled.md"
SMALLEST_SHARED_MEMORY = 99 * 1024  # shared memory in bytes for a program on devices of compute capability 8.6 and 8.9
#: For products in the flow kernels, which are used in exponents; other products have operands of the inputs' dtype.
OPERANDS = {"flows": {"f32"}, "flows_backward": {"f32"}}
OPERANDS.update({name: set() for name in ("feature_sums", "weights", "weights_backward")})


def of_the_table() -> bool:
    """Whether the installed Triton is the version that the table was made with."""
    return f"; triton {metadata.version('triton')}\n" in TABLE.read_text()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def assert_compile(launches, mechanism) -> None:
    module = kernel_modules()[mechanism]
    assert {launch.function.__name__ for launch in launches} == set(kernels_of(module))
    for launch in launches:
        name = launch.function.__name__
        compiled = compile_for(launch, 80, warps_of[f"{module.__name__}.{name}"])
        needed = resources(compiled)
        assert needed.shared <= SMALLEST_SHARED_MEMORY, (name, needed)
        if of_the_table():
            assert not needed.spilled, (name, needed)
        operands = set(re.findall(r"tt\.dot .* : tensor<[x\d]*x(\w+)> \* tensor<[x\d]*x(\w+)>", compiled.asm["ttir"]))
        wanted = OPERANDS.get(name, {next(iter(launch.signature.values())).strip("*").replace("fp", "f")})
        assert operands == {(dtype, dtype) for dtype in wanted}, name


def leaves(dtype, *channels):
    return [torch.zeros(2, 3, 70, size, dtype=dtype, requires_grad=True) for size in channels]


def test_kernels_of_causal_flow_attention():
    """Tiles of 64 or 32 x 16 and x 32, all different so that they cannot be confused."""
    from common.ops.flow.causal import CausalInputs
    from common.ops.flow.gpu.causal import causal_attention

    mask = torch.zeros(2, 70, dtype=torch.bool)
    inputs = leaves(torch.bfloat16, 10, 10, 20)
    with recorded() as launches:
        out, _ = causal_attention(CausalInputs(*inputs, mask, flow_options(phi="relu"), 64, None))
        out.sum().backward()
    assert_compile(launches, "flow")


@pytest.mark.parametrize(
    "dtype, causal, kernel, bias",
    [(torch.float16, True, "relu2", (3, 127)), (torch.float32, False, "laplace", (64, 64))],
    ids=str,
)
def test_kernels_of_mixed_chunk_attention(dtype, causal, kernel, bias):
    """Tiles of 64 x 64 and x 16, backward of 32; in float32 of 32 x 16 and x 32, backward of 16 x 16 and x 64."""
    from common.ops.mixed_chunk.gpu.sequence import whole_sequence

    s, e = (40, 10) if causal else (10, 80)
    bias = torch.zeros(bias, requires_grad=True)
    options = MixedChunkOptions(64, causal, kernel)
    with recorded() as launches:
        whole_sequence(Tokens(*leaves(dtype, s, s, s, s, e)), bias, options, None).sum().backward()
    assert_compile(launches, "mixed_chunk")


def test_a_kernel_that_needs_all_registers():
    """``features_backward`` previously spilled 24 bytes with the table's version of Triton."""
    from common.ops.flow.causal import CausalInputs
    from common.ops.flow.gpu.causal import causal_attention

    inputs = [torch.zeros(2, 4, 1024, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(2, 1024, dtype=torch.bool)
    with recorded() as launches:
        causal_attention(CausalInputs(*inputs, mask, flow_options(), 64, None))[0].sum().backward()
    (launch,) = (launch for launch in launches if launch.function.__name__ == "features_backward")
    usage = resources(compile_for(launch, 80, 8))
    assert usage.shared <= 163 * 1024, usage  # what a program may have on an A100
    if of_the_table():
        assert usage.registers > 200 and not usage.spilled, usage
