"""Compare training from stock softmax weights with training from random weights, on data that every machine has.

``python -m recipes.pretrained.compare [--file any.txt]`` from the checkout's root: about ten minutes on 2 CPU cores.
Language models through fairseq-train, image models through timm's parts. Run again, it goes on where it was
interrupted.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.files.output_files import new_folder

from ..shared import corpus
from ..shared.comparison import Column, Results, table
from ..shared.digits import write_digits
from ..shared.experiment import Data, Experiment, Options, Record, option
from ..shared.image_training import BATCH
from ..shared.settings import given
from ..shared.subword_data import WRITER, Settings, cut_trial, to_data_bin
from ..shared.tables import Table
from ..shared.working_folder import write_text
from . import images, text

COMMAND = "recipes.pretrained.compare"
#: Folders in ``--out``.
TEXT, DIGITS = "text", "images/digits"
#: Bytes of Python's standard library that are the text without ``--file``.
_LIBRARY_BYTES = 1_200_000


@dataclass(frozen=True, kw_only=True)
class Starts(Options):
    """The options: a text. How long each model is trained is fixed."""

    out: Path = option(Path("work/pretrained"), setting=False, type=Path)
    models: Sequence[str] = (*text.NAMES, *images.NAMES)
    seeds: int = 1
    jobs: int = 1
    file: Path | None = option(None, "any text in UTF-8; default: Python's standard library", setting=False, type=Path)
    vocabulary: int = option(2000, "subwords; default: %(default)s")
    source_updates: int = 300  # of the stock language model
    updates: int = 200  # of ours, from either start
    source_epochs: int = 16  # of the stock image model
    epochs: int = 9

    def completed(self) -> "Starts":
        """The options; with ``--quick`` nothing is learned.

        Raises:
            ValueError: ``--file`` is no file.
        """
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"--file is {self.file}, which is no file; allowed: a text file")
        return replace(self, source_updates=5, updates=5, source_epochs=1, epochs=1) if self.quick else self

    def settings(self) -> Record:
        """See ``Options``; with the budget, and with name and SHA-256 of the text."""
        budget = {name: getattr(self, name) for name in ("source_updates", "updates", "source_epochs", "epochs")}
        return {**super().settings(), **budget, **(given("file", self.file) if self.file else {})}


def library_text(path: Path) -> Path:
    """The interpreter's own standard library as one text file at ``path``, made unless it is there."""
    if not path.exists():
        documents = corpus.split_by_file(corpus.read_library(), {"text": _LIBRARY_BYTES})["text"]
        write_text(path, "".join(document.text for document in documents))
    return path


def prepare(options: Starts) -> Data:
    """The text in subwords and the digits; facts: the name of the ``text`` and how many ``digits`` are learned from.

    Raises:
        CommandFailed, ValueError: the text could not be prepared.
    """
    path = options.file or library_text(options.out / "library.txt")
    folder = options.out / TEXT
    to_data_bin(cut_trial(path, folder / "raw", None), folder, Settings(options.vocabulary))
    digits = options.out / DIGITS
    if not digits.exists():
        with new_folder(digits, COMMAND) as new:
            write_digits(new)
    return Data(options.out, {"text": path.name, "digits": sum(1 for _ in (digits / "train").rglob("*.png"))})


def train(options: Starts, data: Data) -> Results:
    """Train what is not yet trained: language models first."""
    runs = data.folder / "runs"
    texts = text.compare_text(runs, data.folder / TEXT / "data-bin", options.source_updates, options.updates)
    if texts.interrupted:
        return texts
    digits = images.compare_images(runs, data.folder / DIGITS, options.source_epochs, options.epochs)
    return texts._replace(outcomes=[*texts.outcomes, *digits.outcomes])


def columns(updates: int) -> list[Column]:
    """Columns of losses before and after."""
    return [
        Column("model", known=lambda name: name.split(".")[0]),
        Column("started from", known=lambda name: f"{name.split('.')[1]} weights"),
        Column("before", lambda records: f"{records[0]['before']:.3f}"),
        Column(f"after {updates} updates", lambda records: f"{records[0]['after']:.3f}"),
    ]


def stock_losses(options: Starts, data: Data, compared: Results) -> Record:
    """The fact ``stock``: the loss of each stock model itself, on the same held-out data."""
    sources = (text.SOURCE, images.SOURCE)
    return {"stock": {one["model"]: one["after"] for one in compared.outcomes if one["model"] in sources}}


def half_notes(facts: Record, unit: str, source: str, trained: str) -> list[str]:
    """Notes below the table of one host, whose stock model is ``source``, ``trained`` so long."""
    loss = facts["stock"].get(source)
    stock = "is not trained" if loss is None else f"has {loss:.3f}"
    return [
        f"held-out loss, {unit}; the stock model, {source.split('.')[0]} {trained}, {stock}",
        "a starting point, not the same model: before any update the two differ",
        "one run, one seed",
    ]


def notes(options: Starts, facts: Record) -> list[str]:
    """Notes below the table of language models."""
    unit = f"bits per token of {options.vocabulary:,} subwords"
    return half_notes(facts, unit, text.SOURCE, f"after {options.source_updates} updates")


def table_of_images(options: Starts, facts: Record, records: list[Record]) -> list[Table]:
    """The table of image models."""
    top1 = Column("top-1, %", lambda records: f"{records[0]['top1']:.1f}")
    shown = [*columns(options.epochs * (facts["digits"] // BATCH)), top1]
    trained = f"of the same size after {options.source_epochs} epochs"
    said = half_notes(facts, "nats per image", images.SOURCE, trained)
    return [table("Image models, handwritten digits", shown, images.NAMES, Results(records, {}), said)]


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=Starts,
    title=lambda options, facts: f"Language models, {facts['text']}",
    columns=lambda options, facts: columns(options.updates),
    order=lambda models, records: text.NAMES,
    notes=notes,
    prepare=prepare,
    train=train,
    measure=stock_losses,
    extra_tables=table_of_images,
    whole={DIGITS: COMMAND, f"{TEXT}/data-bin": WRITER},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
