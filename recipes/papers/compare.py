"""Train all rows of a table as small language models with one budget, and show their order beside the published one.

``python -m recipes.papers.compare flash 1 --file any.txt`` from the checkout's root, through fairseq-train; with
``--pixels 14`` in place of a file, images are the text. Run again, it goes on where it was interrupted.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..shared.comparison import SEEDS, Column, Results, by_model, counted_seeds
from ..shared.experiment import MINUTES, PARAMETERS, PEAK, Data, Experiment, Record, median
from ..shared.image_folder import list_images, read_image
from ..shared.language_models import WHOLE, prepare, read_perplexity
from ..shared.mnist import DIGITS, prepare_images
from ..shared.settings import begun_with
from ..shared.tables import spread
from ..shared.working_folder import write_text
from .measured import said_of_order
from .small import COMMAND, Rows, planned_rows

_LIMITS = (
    "{unit} after {updates:,} updates of a model of width {width}: what is learned first, by a fraction of the paper's "
    "sizes, data and budgets."
)


def prepare_rows(options: Rows) -> Data:
    """The text, of the file or of the pixels, in tokens; see ``language_models.prepare``."""
    if options.pixels is None:
        return prepare(options)
    images = prepare_images(options.data_dir, options.out, COMMAND)
    path, settings = options.out / "pixels.txt", {"images": options.images, "pixels": options.pixels}
    with begun_with(options.out / "pixels.json", settings, (path.name,)):
        if not path.exists():
            write_text(path, pixel_text(images.folder, options.pixels))
        data = prepare(replace(options, file=path))
    return data._replace(facts={**data.facts, "unit": "pixels", "images": images.facts["images"]})


def pixel_text(folder: Path, side: int) -> str:
    """A line for each image, in random order: the grey values of ``side`` x ``side`` pixels, row by row."""
    paths = [path for listed in list_images(folder).values() for path, _ in listed]
    random.Random(0).shuffle(paths)
    images = (read_image(path, side, grey=True) for path in paths)
    return "".join(" ".join(map(str, image.ravel())) + "\n" for image in images)


def what(options: Rows) -> str:
    """The kind of the numbers."""
    unit = "token" if options.pixels is None else "pixel"
    return f"bits per {unit}" if options.values.bits else "perplexity"


def cell(options: Rows, records: Sequence[Record]) -> str:
    """Mean and deviation of the numbers of a row; bits per pixel are those of an image with its end."""
    if not options.values.bits:
        return spread([record["perplexity"] for record in records])
    tokens = 1.0 if options.pixels is None else options.tokens_per_sample / options.pixels**2  # for each pixel
    return spread([tokens * record["bits"] for record in records], 3)


def columns(options: Rows, facts: Record) -> list[Column]:
    """The columns of the table."""
    return [
        Column(f"Table {options.table} of {options.paper}", known=str),
        PARAMETERS,
        Column(what(options), lambda records: cell(options, records)),
        Column("published", known=options.published_cells().__getitem__),
        SEEDS,
        Column("tokens/s", median("tokens_per_second")),
        PEAK,
        MINUTES,
    ]


def measured(options: Rows, data: Data, compared: Results) -> Record:
    """The fact ``measured``: cells by row, as ``measured.json`` has them, and what they are."""
    tokens, unit = data.facts["tokens"], data.facts["unit"]
    found = by_model(compared.outcomes, options.models)
    images = f"{data.facts['images']} in {options.pixels} x {options.pixels} pixels: " if options.pixels else ""
    described = (
        f"{images}{options.depth} of width {options.width}, {options.updates:,} updates of {options.batch_tokens:,} "
        f"{unit} in sequences of {options.tokens_per_sample:,}, {sum(tokens.values()) / 1e6:.1f} million in all; test "
        f"{what(options)}, {counted_seeds(found)}"
    )
    cells = {row: cell(options, records) for row, records in found.items()}
    limits = _LIMITS.format(unit=unit.capitalize(), updates=options.updates, width=options.width)
    return {
        "measured": {
            "what": described,
            "cells": cells,
            "column": options.values.column,
            "limits": limits,
            "higher_is_better": False,
            "part": int(options.masked),
        }
    }


def notes(options: Rows, facts: Record) -> list[str]:
    """Notes below the table, and what the order says."""
    found = facts["measured"]
    ends = "; bits per pixel are those of an image with its end, over its pixels"
    return [
        f"{what(options)} of the test text, mean ± standard deviation over seeds; the valid text selects the "
        f"checkpoint{ends * (options.values.bits and options.pixels is not None)}",
        f"{'masked' if options.masked else 'causal'} models: {found['what']}, highest learning rate {options.lr:g} for "
        "all",
        "tokens per second in training, and the largest memory of the process: on one thread, with whatever else ran",
        *(f"not run: {row}: {reason}" for row, reason in options.not_run().items()),
        said_of_order(found["cells"], options.published_cells()),
        found["limits"],
    ]


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=Rows,
    title=lambda options, facts: options.published.title,
    columns=columns,
    notes=notes,
    prepare=prepare_rows,
    plan=planned_rows,
    read=read_perplexity,
    measure=measured,
    whole={**WHOLE, DIGITS: COMMAND},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
