"""Says which kernels this environment uses on a CPU and on a GPU, and why not: ``python -m common.kernels``."""

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from .command_parser import CommandParser
from .ops.shared.cpu import dispatch as cpu
from .ops.shared.cpu import threads
from .ops.shared.gpu import dispatch as gpu
from .ops.shared.gpu import fla

#: Mechanisms with kernels for CPUs, causal unless they say otherwise, by the kernels that they share.
CPU_KERNELS = {
    "sums": (
        *("linear", "cosformer", "favor", "rfa", "rfa_gate", "t2r", "hedgehog", "retention", "gla", "lolcats"),
        *("lolcats, not causal", "flow with gates"),
    ),
    "flow": ("flow",),
    "all to all": ("flow, not causal",),
    "delta rule": ("gated_delta",),
}
#: Mechanisms with kernels for GPUs, by their kernels.
GPU_KERNELS = {"flow": ("flow, causal",), "mixed chunk": ("mixed_chunk",)}
#: Mechanisms that go through the kernels of fla, causal unless they say otherwise.
FLA_KERNELS = {"sums": CPU_KERNELS["sums"], "delta rule": ("gated_delta", "kimi_delta")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 0."""
    CommandParser(prog="python -m common.kernels", description=__doc__.partition("``")[0].strip()).parse_args(arguments)
    print(f"On a CPU: {cpu_status()}")
    _print_kernels(CPU_KERNELS)
    print(f"On a GPU: {gpu_status()}")
    _print_kernels(GPU_KERNELS)
    print(f"On a GPU, by fla: {fla_status()}")
    _print_kernels(FLA_KERNELS)
    print("Everything else, and everything under torch.export, torch.func and forward mode, is plain PyTorch.")
    return 0


def cpu_status() -> str:
    """Whether kernels for CPUs are used, and why not."""
    if importlib.util.find_spec("numba") is None:
        missing = "plain PyTorch, because Numba is not installed; to install it: pip install numba"
        return _switched_off(cpu) or missing
    problem = _switched_off(cpu) or _import_problem(cpu.has_numba, "Numba")
    with contextlib.suppress(Exception):  # it cannot be imported
        if not cpu.compiles():
            problem = _switched_off(cpu) or "plain PyTorch, because NUMBA_DISABLE_JIT keeps Numba from compiling"
    if problem is not None:
        return problem
    import numba

    cores = f"{torch.get_num_threads()} of {os.cpu_count()} processors"
    kind = "PyTorch's OpenMP" if threads.uses_openmp() else "a pool of Python threads"
    return f"kernels, in float32 and float64, compiled by Numba {numba.__version__}, on {cores}, by {kind}"


def gpu_status() -> str:
    """Whether kernels for GPUs are used, and why not."""
    if not torch.cuda.is_available():
        return _switched_off(gpu) or "no kernels, because PyTorch finds no GPU"
    problem = _switched_off(gpu) or _import_problem(gpu.has_triton, "Triton")
    return problem or f"kernels, in float32, float16 and bfloat16, on {torch.cuda.get_device_name()}"


def fla_status() -> str:
    """Whether fla's kernels are used, and why not."""
    if importlib.util.find_spec("fla") is None:
        missing = "plain PyTorch, because fla-core is not installed; to install it: pip install 'lineartime[gpu]'"
        return _switched_off(gpu) or missing
    if not torch.cuda.is_available():
        return _switched_off(gpu) or "no kernels, because PyTorch finds no GPU"
    problem = _switched_off(gpu) or _import_problem(lambda: fla.functions() is not None, "fla-core")
    return problem or "kernels, in bfloat16, in float16, and in float32 if TF32 is allowed"


def _switched_off(dispatch: ModuleType) -> str | None:
    """The reason why the variable of ``dispatch`` turns its kernels off, or is wrong; None if it does neither."""
    try:
        return None if dispatch.switched_on() else f"plain PyTorch, because {dispatch.VARIABLE} is 0"
    except ValueError as error:
        return f"an error: {error}"


def _import_problem(can_be_imported: Callable[[], bool], package: str) -> str | None:
    """The reason why a package cannot be imported; None if it can be."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can_be_imported():
            return None
    return str(caught[-1].message) if caught else f"plain PyTorch, because {package} cannot be imported"


def _print_kernels(kernels: dict[str, Sequence[str]]) -> None:
    for name, mechanisms in kernels.items():
        print(f"  {name:<12}  {', '.join(mechanisms)}")


if __name__ == "__main__":
    raise SystemExit(main())
