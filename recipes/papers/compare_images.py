"""Train all rows of a table of image models in small, and show their order beside the published one.

``python -m recipes.papers.compare_images daft 2`` from the checkout's root, on 5,000 of MNIST's digits, or with
``--data-dir`` on any folder of images. Run again, it goes on with the next model.
"""

import functools
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..shared.comparison import SEEDS, Column, Results, by_model, counted_seeds, make_records
from ..shared.experiment import MINUTES, PARAMETERS, Data, Experiment, Record, mean
from ..shared.image_training import Images, read_images
from ..shared.mnist import DIGITS, prepare_images
from ..shared.tables import counted
from .entries import entries_of
from .images import SmallImages, build, small_model, train_model
from .measured import said_of_order, value
from .small import IMAGE_TABLES, TableOptions, folder_of
from .small import IMAGES as COMMAND
from .tables import read_paper
from .trainings import NotTrained, Training, trainings_of

_LIMITS = (
    "{learned:,} small images: nothing of photographs, of large models, nor of the paper's augmentation; models that "
    "differ by less than a per cent, {tenth:.0f} held-out images, have no order."
)
_TOP1 = mean("top1")
#: Epochs of the papers' image models.
_EPOCHS = 300


@dataclass(frozen=True, kw_only=True)
class ImageRows(TableOptions, SmallImages):
    """The options of a table's rows as models of images."""

    jobs: int = 1

    def completed(self) -> "ImageRows":
        """The options with the names of the models, and their folder.

        Raises:
            argparse.ArgumentTypeError: an unknown table.
            ValueError: sizes with which a model cannot be built.
        """
        self.check_table(IMAGE_TABLES)
        self.check_sizes(model.training.model for model in self.models_by_name.values())
        return replace(self, models=list(self.models_by_name), out=self.folder())

    @property
    def models_by_name(self) -> dict[str, "Model"]:
        """The models of the table; see ``models_of``."""
        return models_of(self.paper, self.table)


class Model(NamedTuple):
    """A model of a table."""

    row: str
    column: str
    training: Training
    published: str  # its cell


def models_of(paper: str, table: str) -> dict[str, Model]:
    """The models of a table by their names, the best first as published.

    A row has a model for each column, or in a table of one column as many models as it has trainings.
    """
    columns, models, printed = IMAGE_TABLES[paper, table], {}, read_paper(paper).tables[table]
    for row, entry in entries_of(paper)[table].items():
        trainings = trainings_of(entry)
        model_columns = columns * len(trainings) if len(columns) == 1 else columns
        for i, (column, training) in enumerate(zip(model_columns, trainings, strict=True) if trainings else ()):
            if len(columns) > 1:
                name = f"{row}, {column}"
            else:
                name = f"{row}, {training.model}" if i else row
            models[name] = Model(row, column, training, printed.cell(row, column))
    return dict(sorted(models.items(), key=lambda item: -value(item[1].published)))


def epochs_of(training: Training, epochs: int) -> int:
    """``epochs``, scaled down for a row that the paper trains for fewer epochs."""
    train = next(words for words in training.commands() if "torchrun" in words)
    row_epochs = int(train[train.index("--epochs") + 1]) if "--epochs" in train else _EPOCHS
    return max(1, round(epochs * row_epochs / _EPOCHS))


def _said_epochs(options: ImageRows) -> str:
    """The epochs in words, and those of rows that have others."""
    epochs = {name: epochs_of(model.training, options.epochs) for name, model in options.models_by_name.items()}
    others = "; ".join(f"{number} for {name}" for name, number in epochs.items() if number != options.epochs)
    return counted(options.epochs, "epoch") + (f" ({others})" if others else "")


def prepare(options: ImageRows) -> Data:
    """See ``prepare_images``."""
    return prepare_images(options.data_dir, options.out, COMMAND)


def train(options: ImageRows, data: Data) -> Results:
    """Train every model with every seed, all models with the first seed before any with the second."""
    images = read_images(data.folder, options.side)
    return make_records(
        (
            options.out / "runs" / f"{folder_of(name)}.{seed}.json",
            functools.partial(_train, options, images, name, seed),
        )
        for seed in range(1, options.seeds + 1)
        for name in options.models
    )


def _train(options: ImageRows, images: dict[str, Images], name: str, seed: int) -> Record:
    training = options.models_by_name[name].training
    model = build(*small_model(training.model, options), images, seed)
    epochs = epochs_of(training, options.epochs)
    return {"model": name, "seed": seed, **train_model(model, images, epochs, options, f"{name}, seed {seed}")}


def columns(options: ImageRows, facts: Record) -> list[Column]:
    """The columns of the table."""
    models = options.models_by_name
    return [
        Column(f"Table {options.table} of {options.paper}", known=str),
        PARAMETERS,
        Column("top-1, %", _TOP1),
        Column("published", known=lambda name: models[name].published),
        SEEDS,
        MINUTES,
    ]


def measured(options: ImageRows, data: Data, compared: Results) -> Record:
    """Facts: ``measured``, for each column the cells by row as ``measured.json`` has them, and ``order`` in words."""
    models, counts = options.models_by_name, data.facts["counts"]
    found = by_model(compared.outcomes, options.models)
    cells = {name: _TOP1(records) for name, records in found.items()}
    by_column: dict[str, dict[str, str]] = {column: {} for column in IMAGE_TABLES[options.paper, options.table]}
    for name, cell in cells.items():
        row = by_column[models[name].column]
        row[models[name].row] = " / ".join(filter(None, [row.get(models[name].row), cell]))
    described = (
        f"{data.facts['images']}, {counts['train']:,} images of {options.side} x {options.side} pixels, "
        f"{options.layers} layers of width {options.width}, {_said_epochs(options)}; accuracy on "
        f"{counts['validation']:,} that are held out, {counted_seeds(found)}"
    )
    described += "".join(f"; {note}" for note in _notes_of_tokens(options))
    limits = _LIMITS.format(learned=counts["train"], tenth=counts["validation"] / 100)
    kept = [
        {"what": described, "cells": of_column, "column": column, "limits": limits}
        for column, of_column in by_column.items()
    ]
    ordered = {f"{row}, {column}": cell for column, of_column in by_column.items() for row, cell in of_column.items()}
    published = {f"{model.row}, {model.column}": model.published for model in models.values()}
    return {"measured": kept, "order": said_of_order(ordered, published)}


def _notes_of_shapes(options: ImageRows) -> list[str]:
    """A note on hierarchical models, if there are some."""
    if not any("_hier_s" in model.training.model for model in options.models_by_name.values()):
        return []
    return [
        f"hierarchical models have two stages, of width {options.width // 2} and {options.width}, the first in "
        f"patches of {options.stage_patch} x {options.stage_patch}; chunks, windows and landmarks are a quarter of "
        "its tokens"
    ]


def _notes_of_tokens(options: ImageRows) -> list[str]:
    """A note on models with a distillation token, if there are some."""
    if not any("distilled" in model.training.model for model in options.models_by_name.values()):
        return []
    return ["a row with two numbers has a distillation token, without a teacher, in the first and none in the second"]


def notes(options: ImageRows, facts: Record) -> list[str]:
    """Notes below the table, and what the order says."""
    return [
        f"{facts['measured'][0]['what']}; after the last epoch, mean ± standard deviation over seeds; highest learning "
        f"rate {options.lr:g}",
        f"patches of {options.patch} x {options.patch}; a window is the same part of the grid as in the paper",
        *_notes_of_shapes(options),
        *(f"not run: {row}: {entry.reason}" for row, entry in options.entries.items() if isinstance(entry, NotTrained)),
        facts["order"],
        facts["measured"][0]["limits"],
    ]


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=ImageRows,
    title=lambda options, facts: options.published.title,
    columns=columns,
    notes=notes,
    prepare=prepare,
    train=train,
    measure=measured,
    whole={DIGITS: COMMAND},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
