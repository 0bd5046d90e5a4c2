"""Count bytes, operations and launches of kernels, next to the roofline of GPUs that are not there."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from common.command_parser import CommandParser
from common.ops.shared.gpu import dispatch
from common.ops.shared.gpu.launch import interpreted

from ...shared.scripts import RecipeFailed, command_line, positive_int, script
from ...shared.tables import Table, as_markdown, check_document, describe_run, write_document
from .counting import PYTORCH, Work, counted
from .launches import DTYPES, HEAD_SIZES, MECHANISMS, Call, Sizes

MODULE = "recipes.bench.kernels.roofline"
HEADS = 2


class Gpu(NamedTuple):
    """Peak rates of a GPU per second: bytes moved, and operations of products."""

    name: str
    bytes: float
    half: float  # operations of products of half precision
    tf32: float

    def seconds(self, work: Work) -> float:
        """The least seconds for ``work``: those of memory or of products, whichever is longer."""
        return max(self._memory(work), self._products(work))

    def bound(self, work: Work) -> str:
        """Whether memory or products take longer."""
        return "memory" if self._memory(work) >= self._products(work) else "products"

    def _memory(self, work: Work) -> float:
        return work.bytes_once / self.bytes

    def _products(self, work: Work) -> float:
        return work.half / self.half + work.tf32 / self.tf32


#: NVIDIA's data sheets of the A100 80GB SXM and the H100 SXM, without sparsity.
GPUS = (Gpu("A100", 2.039e12, 312e12, 156e12), Gpu("H100", 3.35e12, 989e12, 494e12))


class Pass(NamedTuple):
    """Forward or backward."""

    name: str
    kernels: dict[str, Work]
    least: Work  # inputs read once and outputs written once, and the products that cannot be avoided

    def share(self, gpu: Gpu, caches: bool = True) -> float:
        """The time of ``least`` over the summed time of all kernels."""
        works = [work if caches else replace(work, bytes_once=work.bytes) for work in self.kernels.values()]
        return gpu.seconds(self.least) / sum(map(gpu.seconds, works))


def passes(call: Call) -> list[Pass]:
    """Count the work of all kernels in forward and backward of a call, and give the least work of each pass.

    Raises:
        RecipeFailed: a kernel failed, and plain PyTorch took its place.
    """
    with counted() as forward:
        out = call.attend(*call.inputs)
    grad_out = torch.zeros_like(out)
    with counted() as backward:
        torch.autograd.grad(out, call.inputs, grad_out)
    if dispatch.failed:
        raise RecipeFailed(f"kernels of {', '.join(dispatch.failed)} failed; the warning above says why")
    inputs, outputs = sum(x.nbytes for x in call.inputs), out.nbytes
    tokens = out.shape[:-1].numel()
    # Backward: inputs and the gradient of the output are read, and the gradients of all inputs written.
    moved = inputs + outputs, 2 * inputs + outputs
    exact = out.dtype == torch.float32
    leasts = [_least(size, tokens * operations, exact) for size, operations in zip(moved, call.products)]
    return [Pass("forward", forward, leasts[0]), Pass("backward", backward, leasts[1])]


def _least(size: int, operations: int, exact: bool) -> Work:
    """The least work of a pass, with float32 products as kernels compute them: in three parts of TF32."""
    return Work(1, size, size, 0 if exact else operations, 3 * operations if exact else 0)


def table(title: str, found: list[Pass], tokens: int) -> Table:
    """One row for each kernel of each pass, per token; ``tokens`` counts those of all heads."""
    header = ["pass", "kernel", "launches", "bytes", "once", "operations", *(f"ns on {gpu.name}" for gpu in GPUS)]
    rows: list[list[str]] = []
    for current in found:
        kernels = sorted(current.kernels.items(), key=lambda item: item[0] == PYTORCH)  # the last row
        rows += [_row(current.name, name, work, tokens) for name, work in kernels]
        total = sum(current.kernels.values(), Work())
        nanoseconds = [1e9 * sum(map(gpu.seconds, current.kernels.values())) / tokens for gpu in GPUS]
        rows.append([*_row(current.name, "all", total, tokens)[:-2], *(f"{x:.3f}" for x in nanoseconds)])
        rows.append(_row(current.name, "the least", current.least, tokens))
    notes = [
        "Bytes and operations of products are for each token of each head. Once: each address counts once for the "
        "loads and once for the stores of a launch, as if a cache kept the rest.",
        "ns: the longer of bytes once over bandwidth and operations over rate. PyTorch's operations read their inputs "
        f"and write their outputs once. triton {metadata.version('triton')}.",
        *(f"Share of the roofline, {current.name}: " + _shares(current) for current in found),
    ]
    return Table(title, header, rows, notes)


def _row(name: str, kernel: str, work: Work, tokens: int) -> list[str]:
    numbers = [work.bytes, work.bytes_once, work.half + work.tf32]
    times = [f"{1e9 * gpu.seconds(work) / tokens:.3f} {gpu.bound(work)}" for gpu in GPUS]
    return [name, kernel, str(work.launches), *(f"{number / tokens:,.0f}" for number in numbers), *times]


def _shares(one: Pass) -> str:
    return ", ".join(f"{one.share(gpu):.2f} on {gpu.name} ({one.share(gpu, False):.2f} without caches)" for gpu in GPUS)


def parser() -> CommandParser:
    """The options."""
    parser = CommandParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--mechanism", choices=MECHANISMS, nargs="+", default=list(MECHANISMS), help="default: all")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        nargs="+",
        default=["bfloat16"],
        help="bfloat16 is counted as float16, which has the same bytes and rates: Triton's interpreter computes "
        "its products in float32 (default: bfloat16)",
    )
    parser.add_argument("--head-size", type=int, choices=HEAD_SIZES, nargs="+", default=[64], help="default: 64")
    parser.add_argument(
        "--tokens", type=positive_int, default=512, help=f"of {HEADS} heads each (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("work/roofline.md"), help="default: %(default)s")
    return parser


@script(f"python -m {MODULE}")
def main(arguments: list[str] | None = None) -> int:
    """Count, print and write a table for each mechanism, dtype and head size; 0."""
    options = parser().parse_args(arguments)
    check_document(options.out, MODULE, "--out")
    if not interpreted():  # Triton reads this when it is imported, so a new process is needed
        typed = sys.argv[1:] if arguments is None else arguments
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        return subprocess.run([sys.executable, "-m", MODULE, *typed], env=environment).returncode
    started = time.perf_counter()
    tables = []
    cases = [
        (mechanism, dtype, size)
        for mechanism, dtype in product(options.mechanism, options.dtype)
        for size in options.head_size
    ]
    for mechanism, dtype, size in tqdm(cases, desc="calls", unit="", disable=None):
        counted_dtype = torch.float16 if dtype == "bfloat16" else DTYPES[dtype]
        sizes = Sizes(counted_dtype, size, batch=1, heads=HEADS, tokens=options.tokens, padded=False)
        title = f"{mechanism}, {dtype}, head size {size}, {options.tokens} tokens"
        tables.append(table(title, passes(MECHANISMS[mechanism](sizes)), HEADS * options.tokens))
    text = as_markdown(tables, describe_run(command_line(MODULE, arguments), time.perf_counter() - started))
    print(text)
    write_document(options.out, text, MODULE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
