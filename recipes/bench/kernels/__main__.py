"""Compile every Triton kernel for GPUs that are not there: ``python -m recipes.bench.kernels --help``."""

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from common.command_parser import CommandParser
from common.ops.shared.gpu.launch import interpreted, warps_of

from ...shared.scripts import command_line, script
from ...shared.tables import Table, as_markdown, check_document, describe_run, write_document
from .compiled import CAPABILITIES, Resources, compile_for, fits, resources
from .launches import DTYPES, HEAD_SIZES, MECHANISMS, Launch, Sizes, launches_of

MODULE = "recipes.bench.kernels"
#: A row of the table: mechanism, kernel, warps and dtype.
Row = tuple[str, str, int, str]


def parser() -> CommandParser:
    """The options."""
    parser = CommandParser(prog="python -m recipes.bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", choices=MECHANISMS, nargs="+", default=list(MECHANISMS), help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="default: all")
    parser.add_argument("--head-size", type=int, choices=HEAD_SIZES, nargs="+", default=HEAD_SIZES, help="default: all")
    parser.add_argument("--out", type=Path, default=Path("work/compiled.md"), help="default: %(default)s")
    return parser


def launches(options: argparse.Namespace) -> Iterator[tuple[str, str, int, Launch]]:
    """Mechanism, dtype, head size and each of their launches."""
    for mechanism in options.mechanism:
        for dtype in options.dtype:
            for size in options.head_size:
                for launch in launches_of(MECHANISMS[mechanism](Sizes(DTYPES[dtype], size))):
                    yield mechanism, dtype, size, launch


def compiled(options: argparse.Namespace) -> dict[Row, dict[tuple[int, int], Resources]]:
    """Resources of each kernel by head size and capability: the maximum over the arguments that it is compiled for."""
    rows: dict[Row, dict[tuple[int, int], Resources]] = {}
    for mechanism, dtype, size, launch in tqdm(list(launches(options)), desc="kernels", unit="", disable=None):
        name = launch.function.__name__
        warps = warps_of[f"{launch.function.__module__}.{name}"]
        cells = rows.setdefault((mechanism, name, warps, dtype), {})
        for capability in CAPABILITIES:
            kernel_resources = resources(compile_for(launch, capability, warps))
            cells[size, capability] = Resources(
                *map(max, cells.get((size, capability), kernel_resources), kernel_resources)
            )
    return rows


def table(rows: dict[Row, dict[tuple[int, int], Resources]], head_sizes: list[int]) -> Table:
    """One row for each kernel, number of warps and dtype."""
    columns = [(size, capability) for size in head_sizes for capability in CAPABILITIES]
    header = ["mechanism", "kernel", "warps", "dtype", *(f"{CAPABILITIES[c].name}, {size}" for size, c in columns)]
    lines = [[*map(str, row), *(str(cells.get(column, "none")) for column in columns)] for row, cells in rows.items()]
    wrong = [
        f"{name} of {mechanism}, {dtype}, {size}, {CAPABILITIES[capability].name}: {kernel_resources}"
        for (mechanism, name, _, dtype), cells in rows.items()
        for (size, capability), kernel_resources in cells.items()
        if not fits(kernel_resources, capability)
    ]
    cells = "KiB of shared memory / registers of a thread / bytes of a thread that spill, by GPU and head size"
    notes = [f"{cells}; triton {metadata.version('triton')}"]
    return Table("Kernels as compiled", header, lines, [*notes, *(f"spills or does not fit: {line}" for line in wrong)])


@script("python -m recipes.bench.kernels")
def main(arguments: list[str] | None = None) -> int:
    """Compile, print and write the table; 0."""
    options = parser().parse_args(arguments)
    if interpreted():
        raise ValueError("TRITON_INTERPRET is 1; allowed here: unset, since the interpreter compiles nothing")
    check_document(options.out, MODULE, "--out")
    warnings.filterwarnings("ignore", module="triton")
    started = time.perf_counter()
    kernel_table = table(compiled(options), list(options.head_size))
    run = describe_run(command_line(MODULE, arguments), time.perf_counter() - started)
    text = as_markdown([kernel_table], run)
    print(text)
    write_document(options.out, text, MODULE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
