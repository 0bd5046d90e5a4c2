"""Time Triton kernels on a GPU against plain PyTorch and fused softmax attention, by batch size and length."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from common.command_parser import CommandParser
from common.ops import flow_attention, mixed_chunk_attention
from common.ops.shared.gpu import dispatch

from ...shared.scripts import RecipeFailed, command_line, positive_int, script
from ...shared.tables import MISSING, Run, Table, as_markdown, check_document, write_document
from ..harness import machine
from ..harness.work import Settings
from .launches import CHUNK, DTYPES

MODULE = "recipes.bench.kernels.times"
HEADS = 8
#: Milliseconds of warming up and of measuring, for each number; the median is kept.
WARM_UP, MEASURED = 5, 40

Attention = Callable[..., Tensor]


class Sizes(NamedTuple):
    """The sequences of a call and their tokens."""

    batch: int
    tokens: int


class Times(NamedTuple):
    """Milliseconds, and the memory of a forward and backward pass beyond the inputs in MiB."""

    forward: float
    both: float
    memory: float

    def __str__(self) -> str:
        return f"{self.forward:.3f} / {self.both:.3f} / {self.memory:,.0f}"


def flow(sizes: Sizes, dtype: torch.dtype) -> tuple[Attention, tuple[Tensor, ...]]:
    """Causal Flow-Attention of 8 heads of 64 channels, and its inputs."""

    def attend(*qkv: Tensor) -> Tensor:
        return flow_attention(*qkv, causal=True)

    return attend, _normal(dtype, (sizes.batch, HEADS, sizes.tokens), 64, 64, 64)


def mixed_chunk(sizes: Sizes, dtype: torch.dtype) -> tuple[Attention, tuple[Tensor, ...]]:
    """FLASH's causal attention of 128 channels of queries and 1,024 of values, and its inputs."""

    def attend(*tokens: Tensor) -> Tensor:
        return mixed_chunk_attention(*tokens, chunk_size=CHUNK, causal=True)

    return attend, _normal(dtype, (sizes.batch, sizes.tokens), 128, 128, 128, 128, 1024)


MECHANISMS = {"flow": flow, "mixed_chunk": mixed_chunk}


def _normal(dtype: torch.dtype, shape: tuple[int, ...], *channels: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape, c, device="cuda", dtype=dtype, requires_grad=True) for c in channels)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@contextmanager
def _without_kernels() -> Iterator[None]:
    before = os.environ.get(dispatch.VARIABLE)
    os.environ[dispatch.VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(dispatch.VARIABLE) if before is None else os.environ.update({dispatch.VARIABLE: before})


def measure(attend: Attention, inputs: tuple[Tensor, ...]) -> Times:
    """The times and the memory of ``attend(*inputs)`` alone and with its backward pass."""
    from triton.testing import do_bench

    grad = torch.randn_like(attend(*inputs))

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), inputs, grad)

    both()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    return Times(*(do_bench(f, WARM_UP, MEASURED, return_mode="median") for f in (forward, both)), memory)


def row(mechanism: str, dtype: str, sizes: Sizes) -> list[str]:
    """The cells of one line: kernels, plain PyTorch and softmax."""
    attend, inputs = MECHANISMS[mechanism](sizes, DTYPES[dtype])
    kernels = measure(attend, inputs)
    if dispatch.failed:
        raise RecipeFailed(f"kernels of {', '.join(dispatch.failed)} failed; the warning above says why")
    with _without_kernels():
        plain = measure(attend, inputs)
    softmax = measure(_softmax, inputs) if mechanism == "flow" else None
    speeds = [f"{plain.both / kernels.both:.2f}", MISSING if softmax is None else f"{softmax.both / kernels.both:.2f}"]
    cells = [str(kernels), str(plain), MISSING if softmax is None else str(softmax)]
    return [mechanism, dtype, str(sizes.batch), f"{sizes.tokens:,}", *cells, *speeds]


def parser() -> CommandParser:
    """The options."""
    parser = CommandParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--mechanism", choices=MECHANISMS, nargs="+", default=list(MECHANISMS), help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"], help="default: bfloat16")
    parser.add_argument("--batch", type=positive_int, nargs="+", default=[1, 16], help="sequences (1 16)")
    parser.add_argument(
        "--tokens", type=positive_int, nargs="+", default=[1024, 2048, 8192, 32768], help="default: 1024 to 32768"
    )
    parser.add_argument("--out", type=Path, default=Path("work/times.md"), help="default: %(default)s")
    return parser


def table(options: argparse.Namespace) -> Table:
    """Measure every combination of the options."""
    work = [
        (mechanism, dtype, Sizes(batch, tokens))
        for mechanism in options.mechanism
        for dtype in options.dtype
        for batch in options.batch
        for tokens in options.tokens
    ]
    header = ["mechanism", "dtype", "sequences", "tokens", "kernels", "plain PyTorch", "fused softmax"]
    header += ["over PyTorch", "over softmax"]
    note = "Cells: ms forward / ms forward and backward / MiB beyond the inputs; the last columns compare both passes."
    return Table("Kernels on a GPU", header, [row(*x) for x in tqdm(work, unit=" rows", disable=None)], [note])


@script(f"python -m {MODULE}")
def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the table; 0."""
    options = parser().parse_args(arguments)
    check_document(options.out, MODULE, "--out")
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; needed: a GPU that runs Triton's kernels")
    here = machine.describe(command_line(MODULE, arguments), Settings("cuda", DTYPES[options.dtype[0]], False))
    started = time.perf_counter()
    times = table(options)
    minutes = (time.perf_counter() - started) / 60
    run = Run(here.command, f"{here.device}, {here.processor}", here.versions, here.date, minutes)
    text = as_markdown([times], run)
    print(text)
    write_document(options.out, text, MODULE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
