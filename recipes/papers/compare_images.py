"""Train all rows of a table of image models in small on handwritten digits; show their order beside the published one.

``python -m recipes.papers.compare_images daft 2`` from the checkout's root, through a loop of timm's parts. Run again,
complete trainings are kept.
"""

import csv
import sys
from dataclasses import replace
from pathlib import Path

from common.files.output_files import new_folder

from ..shared.comparison import SEEDS, Column, Results, by_model
from ..shared.digits import SIDE, write_digits
from ..shared.experiment import PARAMETERS, PEAK, Data, Experiment, Record, mean
from .building import count_parameters
from .images import PATCH, ImageRows, Model, planned_rows, small_model, typed
from .measured import said_of_order
from .small import IMAGE_TABLES
from .small import IMAGES as COMMAND
from .trainings import NotTrained

_LIMITS = (
    "1,437 digits of 8 x 8 pixels, and few epochs, after which attention has only begun to learn: nothing of "
    "photographs, nor of the paper's sizes and augmentation."
)
_TOP1 = mean("top1")


def prepare(options: ImageRows) -> Data:
    """The digits, made unless they are there."""
    folder = options.out / "digits"
    if not folder.exists():
        with new_folder(folder, COMMAND) as new:
            write_digits(new)
    return Data(folder, {})


def read_score(options: ImageRows, folder: Path, known: Record) -> Record:
    """Parameters, and ``top1``: per cent of the held-out digits after the last epoch, as these select nothing."""
    with open(folder / "timm" / "summary.csv", newline="", encoding="utf-8") as file:
        top1 = float(list(csv.DictReader(file))[-1]["eval_top1"])
    row = options.models_by_name[known["model"]].training
    name, kwargs = small_model(row.model, options)
    model = f"{name} --model-kwargs {' '.join(typed({**kwargs, 'num_classes': 10}))}"
    return {"parameters": count_parameters(replace(row, model=model)), "top1": top1}


def columns(options: ImageRows, facts: Record) -> list[Column]:
    """The columns of the table."""
    models = options.models_by_name
    return [
        Column(f"Table {options.table} of {options.paper}", known=str),
        PARAMETERS,
        Column("top-1, %", _TOP1),
        Column("published", known=lambda name: models[name].published),
        SEEDS,
        PEAK,
    ]


def measured(options: ImageRows, data: Data, compared: Results) -> Record:
    """Facts: ``measured``, for each column the cells by row as ``measured.json`` has them, and ``order`` in words."""
    models = options.models_by_name
    cells = {name: _TOP1(records) for name, records in by_model(compared.outcomes, options.models).items()}
    described = (
        f"handwritten digits, {options.layers} layers of width {options.width}, {options.epochs} epochs; accuracy on "
        f"360 that are held out, {options.seeds} seed{'s' * (options.seeds > 1)}"
    )
    kept = [
        {
            "what": described,
            "cells": {models[name].row: cell for name, cell in cells.items() if models[name].column == column},
            "column": column,
            "limits": _LIMITS,
        }
        for column in IMAGE_TABLES[options.paper, options.table]
    ]
    return {"measured": kept, "order": said_of_order(cells, {name: model.published for name, model in models.items()})}


def _notes_of_shapes(models: dict[str, Model], width: int) -> list[str]:
    """Notes on hierarchical models and on those with a distillation token, if there are some."""
    names = [model.training.model.split()[0] for model in models.values()]
    notes = []
    if any(name.endswith("_hier_s") for name in names):
        notes.append(f"hierarchical models have two stages, of width {width // 2} and {width}")
    if any("distilled" in name for name in names):
        notes.append("models with a distillation token learn without a teacher")
    return notes


def notes(options: ImageRows, facts: Record) -> list[str]:
    """Notes below the table, and what the order says."""
    return [
        f"{facts['measured'][0]['what']}; after the last epoch, mean ± standard deviation over seeds; highest learning "
        f"rate {options.lr:g}",
        f"images of {SIDE} x {SIDE} in patches of {PATCH} x {PATCH}; a window is the same part of the grid as there",
        *_notes_of_shapes(options.models_by_name, options.width),
        *(f"not run: {row}: {entry.reason}" for row, entry in options.entries.items() if isinstance(entry, NotTrained)),
        facts["order"],
        _LIMITS,
    ]


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=ImageRows,
    title=lambda options, facts: options.published.title,
    columns=columns,
    notes=notes,
    prepare=prepare,
    plan=planned_rows,
    read=read_score,
    measure=measured,
    whole={"digits": COMMAND},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
