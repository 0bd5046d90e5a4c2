"""Says which kernels this environment uses on a CPU and on a GPU, and why not: ``python -m common.kernels``."""

import importlib.util
import os
import warnings
from collections.abc import Sequence

import torch

from .command_parser import CommandParser
from .ops.shared.cpu import dispatch as cpu
from .ops.shared.gpu import dispatch as gpu

#: Causal mechanisms with kernels for CPUs, by the kernels that they share.
CPU_KERNELS = {
    "sums": (
        *("linear", "cosformer", "favor", "rfa", "rfa_gate", "t2r", "hedgehog", "retention", "gla", "lolcats"),
        "flow with gates",
    ),
    "flow": ("flow",),
    "delta rule": ("gated_delta",),
}
#: Mechanisms with kernels for GPUs, by their kernels.
GPU_KERNELS = {"flow": ("flow, causal",), "mixed chunk": ("mixed_chunk",)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 0."""
    CommandParser(prog="python -m common.kernels", description=__doc__.partition("``")[0].strip()).parse_args(arguments)
    print(f"On a CPU: {cpu_status()}")
    _print_kernels(CPU_KERNELS)
    print(f"On a GPU: {gpu_status()}")
    _print_kernels(GPU_KERNELS)
    print("Everything else, and everything under torch.export, torch.func and forward mode, is plain PyTorch.")
    return 0


def cpu_status() -> str:
    """Whether kernels for CPUs are used, and why not."""
    try:
        if not cpu.switched_on():
            return f"plain PyTorch, because {cpu.VARIABLE} is 0"
    except ValueError as error:
        return f"an error: {error}"
    if importlib.util.find_spec("numba") is None:
        return "plain PyTorch, because Numba is not installed; to install it: pip install numba"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not cpu.has_numba():
            return str(caught[-1].message) if caught else "plain PyTorch, because Numba cannot be imported"
    import numba

    cores = f"{torch.get_num_threads()} of {os.cpu_count()} processors"
    return f"kernels, in float32 and float64, compiled by Numba {numba.__version__}, on {cores}"


def gpu_status() -> str:
    """Whether kernels for GPUs are used, and why not."""
    try:
        if not gpu.switched_on():
            return f"plain PyTorch, because {gpu.VARIABLE} is 0"
    except ValueError as error:
        return f"an error: {error}"
    if not torch.cuda.is_available():
        return "no kernels, because PyTorch finds no GPU"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not gpu.has_triton():
            return str(caught[-1].message) if caught else "plain PyTorch, because Triton cannot be imported"
    return f"kernels, in float32, float16 and bfloat16, on {torch.cuda.get_device_name()}"


def _print_kernels(kernels: dict[str, Sequence[str]]) -> None:
    for name, mechanisms in kernels.items():
        print(f"  {name:<12}  {', '.join(mechanisms)}")


if __name__ == "__main__":
    raise SystemExit(main())
