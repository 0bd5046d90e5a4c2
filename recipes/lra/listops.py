"""Generate ListOps: ``python -m recipes.lra.listops --out work/lra/listops --seed 1`` from the checkout's root.

Writes ``train.tsv``, ``valid.tsv`` and ``test.tsv``, with the columns Source and Target, and ``data-bin`` for
fairseq-train. The same seed gives the same bytes for any number of processes. An interrupted run continues where it
stopped. ``--file`` uses the released tables instead.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.command_parser import CommandParser
from fairseq_plugin.data.pixels import FIRST_TOKEN

from ..shared.commands import shown_path
from ..shared.scripts import positive_int, script
from ..shared.settings import begun_with
from ..shared.working_folder import register, remove_own, working_folder
from .examples import SPLITS, WRITER, Example, symbol_dictionary, write_examples
from .listops_blocks import Plan, check_plan, distinct_lines
from .listops_rules import DIGITS, SYMBOLS, evaluate
from .tables import Row, read_table, write_table

COMMAND = "recipes.lra.listops"
#: Numbers of expressions in the release; each has more than 500 and fewer than 2,000 symbols.
SIZES = {"train": 96_000, "valid": 2_000, "test": 2_000}
MIN_LENGTH, MAX_LENGTH = 500, 2_000
CLASSES = 10
#: The tables in the release's folder listops-1000.
RELEASED = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}
#: What a refused run removes, since others can then be begun in its folder.
_MADE = ("blocks", *(f"{split}.tsv" for split in SPLITS))
_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}


def generate(plan: Plan, out: Path, processes: int = 1) -> None:
    """Write the tables and ``data-bin`` of ``plan`` to ``out``; existing ones are kept.

    Raises:
        ValueError: ``out`` was started with another plan or contains other files, or there are not enough expressions
            of these lengths.
    """
    check_plan(plan)
    sizes = {split: getattr(plan, split) for split in SPLITS}
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        with begun_with(out / "settings.json", plan._asdict(), _MADE):
            if not all((out / f"{split}.tsv").exists() for split in SPLITS):
                _write_tables(plan, sizes, out, processes)
        remove_own(out / "blocks")
        if not (out / "data-bin").exists():
            binarise(out, sum(sizes.values()))


def _write_tables(plan: Plan, sizes: dict[str, int], out: Path, processes: int) -> None:
    total = sum(sizes.values())
    register(out / "blocks").mkdir(exist_ok=True)
    lines = distinct_lines(plan, out / "blocks", total, processes)
    with contextlib.closing(lines), tqdm(total=total, desc="ListOps", unit=" expressions", disable=None) as bar:
        for split, size in sizes.items():
            write_table(out / "blocks" / f"{split}.tsv", _counted(itertools.islice(lines, size), bar))
    for split in SPLITS:  # all tables or none
        (out / "blocks" / f"{split}.tsv").replace(register(out / f"{split}.tsv"))


def take_released(folder: Path, out: Path) -> None:
    """Write the released tables in ``folder`` without their parentheses, and ``data-bin``.

    Raises:
        ValueError: ``out`` contains other files, a table is missing or damaged, or a value does not match its
            expression.
    """
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        with begun_with(out / "settings.json", {"file": str(folder.absolute())}, _MADE):
            for split, name in RELEASED.items():
                with tqdm(desc=name, unit=" expressions", disable=None) as bar:
                    rows = (f"{' '.join(_released_symbols(row))}\t{row.target}\n" for row in read_table(folder / name))
                    write_table(out / f"{split}.tsv", _counted(rows, bar))
        binarise(out, None)


def _released_symbols(row: Row) -> list[str]:
    """The symbols of a released row, without the parentheses that group pairs of symbols.

    Raises:
        ValueError: a symbol is unknown, or the value does not match the expression.
    """
    symbols = [symbol for symbol in row.source.split() if symbol not in "()"]
    try:
        value = evaluate(symbols)
    except ValueError as error:
        raise ValueError(f"{row.place} has {error}") from error
    if row.target != str(value):
        raise ValueError(f"{row.place} has the Target {row.target!r}; allowed: {value}, the value of its Source")
    return symbols


def binarise(out: Path, total: int | None) -> None:
    """Write ``out``/data-bin from the tables in ``out``.

    Raises:
        ValueError: a table has an unknown symbol or value.
    """
    splits = {split: map(to_example, read_table(out / f"{split}.tsv")) for split in SPLITS}
    write_examples(out / "data-bin", splits, symbol_dictionary(SYMBOLS), CLASSES, total)


def to_example(row: Row) -> Example:
    """The tokens and the class of a row.

    Raises:
        ValueError: a symbol is unknown, or the Target is not a digit.
    """
    try:
        tokens = np.array([_NUMBERS[symbol] for symbol in row.source.split()], np.int32) + FIRST_TOKEN
    except KeyError as error:
        raise ValueError(f"{row.place} has the symbol {error}; allowed: {' '.join(SYMBOLS)}") from error
    if row.target not in DIGITS:
        raise ValueError(f"{row.place} has the Target {row.target!r}; allowed: a digit, 0 to 9")
    return Example((tokens,), int(row.target))


def _counted(lines: Iterable[str], bar: tqdm) -> Iterator[str]:
    for line in lines:
        bar.update()
        yield line


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.listops", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/lra/listops"), help="default: %(default)s")
    parser.add_argument(
        "--file", type=Path, metavar="FOLDER", help="the release's listops-1000, in place of generating"
    )
    parser.add_argument("--seed", type=int, help="default: 1")
    for split, size in SIZES.items():
        parser.add_argument(f"--{split}", type=positive_int, help=f"expressions; default: {size:,}")
    parser.add_argument("--min-length", type=int, help=f"all have more symbols; default: {MIN_LENGTH}")
    parser.add_argument("--max-length", type=positive_int, help=f"all have fewer symbols; default: {MAX_LENGTH:,}")
    parser.add_argument(
        "--processes", type=positive_int, default=os.cpu_count(), help="that share the work; default: one for each CPU"
    )
    return parser


@script("listops")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    defaults = {"seed": 1, **SIZES, "min_length": MIN_LENGTH, "max_length": MAX_LENGTH}
    chosen_settings = {name: value for name in defaults if (value := getattr(options, name)) is not None}
    if options.file is None:
        generate(Plan(**{**defaults, **chosen_settings}), out, options.processes)
    elif chosen_settings:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in chosen_settings)
        raise ValueError(f"{names} and --file are given; allowed: one or the other, the release is as it is")
    else:
        take_released(options.file, out)
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/lra/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
