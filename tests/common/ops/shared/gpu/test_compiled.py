"""Every kernel compiles to machine code of a GPU, which needs none, and fits its shared memory.

The interpreter runs what the compiler refuses: a variable, say, that changes its shape in a loop.
"""

import re
import sys

import pytest
import torch

from common.ops.flow.options import flow_options
from common.ops.mixed_chunk.sequence import Tokens, mixed_chunk_options
from common.ops.shared.gpu.launch import interpreted

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone; there its absence is an error"),
    pytest.mark.skipif(interpreted(), reason="in the interpreter, nothing is compiled"),
]

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
FLOW = (
    "feature_sums",
    "flows",
    "value_sums",
    "outputs",
    "values_backward",
    "flows_backward",
    "features_backward",
)
MIXED_CHUNK = ("chunk_sums", "outputs", "queries_backward", "keys_backward", "values_backward")
SMALLEST_SHARED_MEMORY = 99 * 1024  # bytes a program may have on devices of compute capability 8.6 and 8.9


class Recorder:
    """Takes the place of a kernel and notes what it is launched with."""

    def __init__(self, kernel, launches) -> None:
        self.function, self.launches = (
            kernel.fn if hasattr(kernel, "configs") else kernel,
            launches,
        )  # with a GPU, in a tuner

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, **kwargs) -> None:
        given = {**dict(zip(self.function.arg_names, args)), **kwargs}
        constants = {p.name: given[p.name] for p in self.function.params if p.is_constexpr}
        signature = {name: _type_of(given[name], name in constants) for name in self.function.arg_names}
        self.launches[self.function.__name__, str(constants), str(signature)] = self.function, signature, constants


def _type_of(x, constant: bool) -> str:
    if constant:
        return "constexpr"
    return TYPES[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """What is launched, instead of launching it."""
    from common.ops.flow import causal_gpu_kernels as flow_attention_kernels
    from common.ops.mixed_chunk import gpu as mixed_chunk_attention
    from common.ops.mixed_chunk import gpu_kernels as mixed_chunk_attention_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # What a device with little memory gets; there is none to ask.
    monkeypatch.setattr(mixed_chunk_attention, "tile_rows", lambda x, channels: 32)
    found = {}
    for module, names in ((flow_attention_kernels, FLOW), (mixed_chunk_attention_kernels, MIXED_CHUNK)):
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    return found


def assert_compile(launches, kernels) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    assert {name for name, *_ in launches} == set(kernels)
    for function, signature, constants in launches.values():
        source = ASTSource(function, signature, constants)
        compiled = compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4, "num_stages": 1})
        assert "cubin" in compiled.asm, function.__name__
        assert compiled.metadata.shared <= SMALLEST_SHARED_MEMORY, function.__name__
        # Products have operands of the inputs' dtype, but flows, which stand in an exponent, those of TF32.
        exact = function.__name__ in ("flows", "flows_backward")
        operands = set(re.findall(r"tt\.dot .* : tensor<[x\d]*x(\w+)> \* tensor<[x\d]*x(\w+)>", compiled.asm["ttir"]))
        dtype = "f32" if exact else signature[function.arg_names[0]].strip("*").replace("fp", "f")
        assert operands == (set() if function.__name__ == "feature_sums" else {(dtype, dtype)}), function.__name__


def leaves(dtype, *channels):
    return [torch.zeros(2, 3, 70, size, dtype=dtype, requires_grad=True) for size in channels]


def test_kernels_of_causal_flow_attention(launches):
    """Tiles of 64 x 16, 64 x 32 and 64 x 64, that none be mistaken for another."""
    from common.ops.flow.causal import CausalInputs
    from common.ops.flow.causal_gpu import causal_attention

    mask = torch.zeros(2, 70, dtype=torch.bool)
    inputs = leaves(torch.bfloat16, 10, 10, 20)
    out, _ = causal_attention(CausalInputs(*inputs, mask, flow_options(phi="relu"), 64, None))
    out.sum().backward()
    assert_compile(launches, FLOW)


@pytest.mark.parametrize(
    "dtype, causal, kernel, bias",
    [(torch.float16, True, "relu2", (3, 127)), (torch.float32, False, "laplace", (64, 64))],
    ids=str,
)
def test_kernels_of_mixed_chunk_attention(dtype, causal, kernel, bias, launches):
    """Tiles of 32 x 64, 32 x 16 and 32 x 32."""
    from common.ops.mixed_chunk.gpu import whole_sequence

    s, e = (40, 10) if causal else (10, 80)
    bias = torch.zeros(bias, requires_grad=True)
    options = mixed_chunk_options(64, causal, kernel)
    whole_sequence(Tokens(*leaves(dtype, s, s, s, s, e)), bias, options, None).sum().backward()
    assert_compile(launches, MIXED_CHUNK)
