"""Count multiply-adds, parameters and memory of models of either host, at any length or image size.

``python -m recipes.cost --arch flowformer_lm softmax_lm --tokens 512 2048`` and ``python -m recipes.cost --model
flowformer_hier_s deit_small_patch16_224 --img-size 224`` from the checkout's root.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from common.command_parser import CommandParser
from timm_plugin.named_values import NamedValues

from ..shared.scripts import command_line, positive_int, script
from ..shared.tables import MISSING, Run, Table, as_text, describe_run, write_reports
from ..shared.working_folder import working_folder
from .counting import Cost, cost
from .models import DEFAULT, Sizes, Subject, fairseq_subject, timm_subject

COMMAND = "recipes.cost"


class Row(NamedTuple):
    """One model at one size."""

    name: str
    size: str
    cost: Cost


def table(rows: Sequence[Row], published: Mapping[str, Any] | None = None) -> Table:
    """One line per model and size, with multiply-adds in G, parameters in M, memory in MiB.

    ``published`` maps models to the multiply-adds, in G, that a paper prints; they get a column next to ours.
    """
    header = ["model", "input", "parameters", "multiply-adds", "training memory", "inference memory"]
    lines = []
    for row in rows:
        memory = [
            MISSING if number_of_bytes is None else f"{number_of_bytes / 2**20:,.1f} MiB"
            for number_of_bytes in row.cost[2:]
        ]
        multiply_adds, parameters = f"{row.cost.multiply_adds / 1e9:.3f} G", f"{row.cost.parameters / 1e6:.2f} M"
        published_cell = [] if published is None else [f"{published[row.name]} G" if row.name in published else MISSING]
        lines.append((row.name, row.size, parameters, multiply_adds, *published_cell, *memory))
    if published is not None:
        header.insert(4, "published")
    notes = [
        "multiply-adds: of matrix products and convolutions that run in a forward pass of one batch, without the loss",
        "training memory: peak of a forward and backward pass, with gradients and without weights, as on this device; "
        "inference memory: peak of a forward pass, without weights",
    ]
    return Table("Cost", header, lines, notes)


def subjects(options: argparse.Namespace, arguments: Sequence[str]) -> Iterator[Subject]:
    """Build every model at every size, one at a time."""
    sizes = Sizes(options.batch_size, options.vocabulary, options.channels, options.classes)
    for name in options.arch:
        for tokens in options.tokens:
            yield fairseq_subject(name, tokens, arguments, sizes)
    for name in options.model:
        for size in options.img_size or [None]:
            yield timm_subject(name, size, options.model_kwargs, options.batch_size)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(
        prog=f"python -m {COMMAND}",
        description=__doc__.splitlines()[0],
        epilog="Any other option is one of fairseq-train's, for all architectures.",
    )
    default = DEFAULT
    parser.add_argument("--arch", nargs="+", default=[], metavar="NAME", help="architectures of fairseq")
    parser.add_argument("--tokens", nargs="+", type=positive_int, default=[512], metavar="N", help="lengths (512)")
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME", help="models of timm")
    parser.add_argument("--img-size", nargs="+", type=positive_int, metavar="N", help="default: each model's own")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=NamedValues, metavar="K=V", help="for timm")
    parser.add_argument("--batch-size", type=positive_int, default=default.batch, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=positive_int, default=default.vocabulary, help="symbols (%(default)s)")
    parser.add_argument("--channels", type=positive_int, default=default.channels, help="of a series (%(default)s)")
    parser.add_argument("--classes", type=positive_int, default=default.classes, help="of classifiers (%(default)s)")
    parser.add_argument("--no-memory", action="store_true", help="count alone, in one forward pass")
    parser.add_argument(
        "--published",
        nargs="*",
        action=NamedValues,
        metavar="NAME=G",
        help="what a paper prints, for a column of it",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.txt, .md and .json")
    return parser


def check_published(options: argparse.Namespace) -> None:
    """Raise ValueError if ``--published`` names a model that is not counted, or has a value that is not a number."""
    counted_names = [*options.arch, *options.model]
    for name, value in (options.published or {}).items():
        option = f"--published is {name}={value}"
        if name not in counted_names:
            raise ValueError(f"{option}; allowed: of {', '.join(counted_names)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{option}; allowed: a number of G, as in {name}=4.6")


@script("cost")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options, fairseq_arguments = parser().parse_known_args(arguments)
    if not options.arch and not options.model:
        raise ValueError("neither --arch nor --model is given; allowed: names for one of them, or for both")
    if fairseq_arguments and not options.arch:
        raise ValueError(
            f"{fairseq_arguments[0]} is not known; allowed: see --help, and fairseq-train's options with --arch"
        )
    check_published(options)
    if options.out is None:
        tables, run, _ = counted(options, fairseq_arguments, arguments)
        print(as_text(tables, run))
        return 0
    with working_folder(options.out.absolute(), COMMAND):
        tables, run, rows = counted(options, fairseq_arguments, arguments)
        content = {"run": run._asdict(), "rows": [{**row._asdict(), "cost": row.cost._asdict()} for row in rows]}
        print(write_reports(options.out, tables, run, content))
    return 0


def counted(
    options: argparse.Namespace, further: Sequence[str], arguments: Iterable[str] | None
) -> tuple[list[Table], Run, list[Row]]:
    """Measure all models; returns the table, a description of the run, and the rows."""
    started, rows = time.monotonic(), []
    torch.set_num_threads(1)
    total = len(options.arch) * len(options.tokens) + len(options.model) * len(options.img_size or [None])
    for subject in tqdm(subjects(options, further), total=total, desc="models", unit="", disable=None):
        subject_cost = cost(subject.model, *subject.inputs, memory=not options.no_memory, **subject.named)
        rows.append(Row(subject.name, subject.size, subject_cost))
    run = describe_run(command_line(COMMAND, arguments), time.monotonic() - started)
    return [table(rows, options.published)], run, rows


if __name__ == "__main__":
    sys.exit(main())
