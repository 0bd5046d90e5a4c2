"""Train all rows of a table of image models in small on handwritten digits; show their order beside the published one.

``python -m recipes.papers.compare_images daft 2`` from the checkout's root, through a loop of timm's parts. Run again,
complete trainings are kept.
"""

import csv
import functools
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common.command_parser import CommandParser
from common.output_files import new_folder

from ..demo.digits import SIDE, write_digits
from ..shared import comparison
from ..shared.comparison import PARAMETERS, PEAK, SEEDS, Column, Report, show, train_and_read
from ..shared.scripts import command_line, positive_int, positive_number, script
from ..shared.settings import keep_settings
from ..shared.tables import spread
from ..shared.trainings import Trained
from ..shared.working_folder import working_folder
from .building import count_parameters
from .entries import entries_of
from .images import PATCH, Model, Size, models_of, planned_trainings, published, small_model, typed
from .measured import said_of_order
from .small import FOLDER, IMAGE_TABLES, folder, refusal
from .small import IMAGES as COMMAND
from .tables import PAPERS, read_paper
from .trainings import NotTrained

_LIMITS = (
    "1,437 digits of 8 x 8 pixels, and few epochs, after which attention has only begun to learn: nothing of "
    "photographs, nor of the paper's sizes and augmentation; rows nearer to each other than their deviations have no "
    "order."
)


class Score(NamedTuple):
    """A complete training."""

    model: str  # its row, and where a row has several models, its column
    seed: int
    parameters: int
    top1: float  # percent of the held-out digits, after the last epoch
    peak_bytes: int
    command: str


def read_score(models: dict[str, Model], size: Size, name: str, seed: int, folder: Path, trained: Trained) -> Score:
    """A complete training, after its last epoch: the held-out digits select nothing."""
    with open(folder / "timm" / "summary.csv", newline="", encoding="utf-8") as file:
        top1 = float(list(csv.DictReader(file))[-1]["eval_top1"])
    small, kwargs = small_model(models[name].training.model, size)
    model = f"{small} --model-kwargs {' '.join(typed({**kwargs, 'num_classes': 10}))}"
    parameters = count_parameters(replace(models[name].training, model=model))
    return Score(name, seed, parameters, top1, trained.peak_bytes, trained.command)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("paper", metavar="PAPER", type=str.lower, choices=PAPERS, help=", ".join(PAPERS))
    parser.add_argument("table", metavar="TABLE", help="as python -m recipes.papers lists them")
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: %(default)s")
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=1, help="trainings at a time, a thread each (%(default)s)")
    parser.add_argument(
        "--lr", type=positive_number, default=2e-3, help="highest learning rate, of all models (%(default)s)"
    )
    for name, default in {"width": 48, "layers": 2, "heads": 4, "epochs": 10}.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    return parser


@script("compare_images")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status, 2 for a table that is not there."""
    options = parser().parse_args(arguments)
    table = (options.paper, options.table.lower())
    if table not in IMAGE_TABLES:
        parser().error(refusal(IMAGE_TABLES, *table))
    size = Size(*(getattr(options, name) for name in Size._fields))
    out = folder(options.out, *table).absolute()
    with working_folder(out, COMMAND, whole={"digits": COMMAND}):
        started = time.monotonic()
        keep_settings(out / "settings.json", size._asdict())
        if not (out / "digits").exists():
            with new_folder(out / "digits", COMMAND) as new:
                write_digits(new)
        models = models_of(*table)
        planned = planned_trainings(out / "runs", out / "digits", models, size, options.seeds)
        read = functools.partial(read_score, models, size)
        compared = train_and_read(planned, out / "runs", options.jobs, read)
        show(out, report(*table, models, size, options.seeds, compared), command_line(COMMAND, arguments), started)
    return compared.status


def _notes_of_shapes(models: dict[str, Model], size: Size) -> list[str]:
    """Notes on hierarchical models and on those with a distillation token, if there are some."""
    names = [one.training.model.split()[0] for one in models.values()]
    notes = []
    if any(name.endswith("_hier_s") for name in names):
        notes.append(f"hierarchical models have two stages, of width {size.width // 2} and {size.width}")
    if any("distilled" in name for name in names):
        notes.append("models with a distillation token learn without a teacher")
    return notes


def report(
    paper: str, table: str, models: dict[str, Model], size: Size, seeds: int, compared: comparison.Compared
) -> Report:
    """A table with a row for each model, best first as published, and what the order says."""
    printed = published(paper, table, models)
    top1 = Column("top-1, %", lambda scores: spread([one.top1 for one in scores]))
    columns = [
        *(Column(f"Table {table} of {paper}", known=str), PARAMETERS, top1),
        *(Column("published", known=printed.__getitem__), SEEDS, PEAK),
    ]
    described = (
        f"handwritten digits, {size.layers} layers of width {size.width}, {size.epochs} epochs; accuracy on 360 that "
        f"are held out, {seeds} seed{'s' * (seeds > 1)}"
    )
    found = comparison.by_model(compared.outcomes, list(models))
    cells = {name: top1.measured(scores) for name, scores in found.items()}
    not_run = {row: entry.reason for row, entry in entries_of(paper)[table].items() if isinstance(entry, NotTrained)}
    notes = [
        f"{described}; after the last epoch, mean ± standard deviation over seeds; highest learning rate {size.lr:g}",
        f"images of {SIDE} x {SIDE} in patches of {PATCH} x {PATCH}; a window is the same part of the grid as there",
        *_notes_of_shapes(models, size),
        *(f"not run: {row}: {reason}" for row, reason in not_run.items()),
        said_of_order(cells, printed),
        _LIMITS,
    ]
    content = {
        "size": size._asdict(),
        "scores": [one._asdict() for one in compared.outcomes],
        "failed": compared.failed,
        "measured": [
            {
                "what": described,
                "cells": {models[name].row: cell for name, cell in cells.items() if models[name].column == column},
                "column": column,
                "limits": _LIMITS,
            }
            for column in IMAGE_TABLES[paper, table]
        ],
    }
    title = read_paper(paper).tables[table].title
    return Report([comparison.table(title, columns, list(models), compared, notes)], content, None)


if __name__ == "__main__":
    sys.exit(main())
