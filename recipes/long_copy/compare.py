"""Train every encoder-decoder to copy marked passages from long sources, with one budget; print what each gets right.

``python -m recipes.long_copy.compare --file FILE --seeds 3`` from the checkout's root, through fairseq-train and
fairseq-generate. Another run continues where the last one stopped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..shared.comparison import MODEL, SEEDS, Column
from ..shared.encoder_decoders import (
    STOCK,
    EncoderDecoders,
    generate,
    model_notes,
    models_option,
    read,
    reads_source_in_one_state,
)
from ..shared.experiment import PARAMETERS, PEAK, Data, Experiment, Picture, Record, largest, mean, median, option
from . import prepare
from .generated import Counted, count
from .passages import Layout
from .prepare import SOURCE, TARGET

DEFAULT_MODELS = (
    STOCK,
    "flow/softmax",
    "flow/linear",
    "flow/cosformer",
    "flow/flow_source",
    "linear/softmax",
    "linear/linear",
    "cosformer/cosformer",
)


@dataclass(frozen=True, kw_only=True)
class LongCopy(EncoderDecoders):
    """The options of encoder-decoders that copy passages."""

    counted: ClassVar[type] = Counted
    languages: ClassVar[tuple[str, str]] = (SOURCE, TARGET)

    file: Path = option(None, "any text in UTF-8", setting=False, type=Path, required=True)
    source_tokens: int = option(2048, "of each source (%(default)s)", quick=64, setting=False)
    spans: int = option(16, "marked passages of a source, one in each equal part (%(default)s)", quick=2, setting=False)
    span_tokens: int = option(1, "of each passage (%(default)s)", quick=3, setting=False)
    train: int = option(32_000, "examples to train on (%(default)s)", quick=40, setting=False)
    valid: int = option(200, "examples to select a checkpoint (%(default)s)", quick=4, setting=False)
    test: int = option(200, "examples to generate from (%(default)s)", quick=4, setting=False)
    models: Sequence[str] = models_option(DEFAULT_MODELS)
    batch_size: int = option(8)

    @property
    def data(self) -> prepare.Data:
        """The settings of the data."""
        layout = Layout(self.source_tokens, self.spans, self.span_tokens)
        return prepare.Data(layout, {"train": self.train, "valid": self.valid, "test": self.test}, 1)

    def batch_arguments(self) -> list[object]:
        """See ``EncoderDecoders``."""
        return ["--batch-size", self.batch_size]

    def longest_arguments(self) -> list[object]:
        """The longest source and target, each with </s>. fairseq-generate needs them too: its default is 1,024."""
        longest = (self.data.layout.source_tokens + 1, self.data.layout.target_tokens + 1)
        return ["--max-source-positions", longest[0], "--max-target-positions", longest[1]]

    def generate_arguments(self) -> list[object]:
        """One source at a time; no target is longer than the right one."""
        return ["--batch-size", 1, "--max-len-a", 0, "--max-len-b", self.data.layout.target_tokens]

    def count(self, lines: Sequence[str]) -> Counted:
        """See ``EncoderDecoders``."""
        return count(lines, self.span_tokens)


def notes(options: LongCopy, facts: Record) -> list[str]:
    """Notes below the table."""
    layout = options.data.layout
    examples = ", ".join(f"{number:,} {split}" for split, number in options.data.examples.items())
    return [
        f"sources of {layout.source_tokens:,} characters, {layout.spans} marked passages of {layout.span_tokens} "
        f"each; examples: {examples}",
        "next: per cent of the characters of the valid split's targets, </s> included, the right ones before given",
        f"exact, passages, tokens: per cent of whole targets, of passages, and of characters in their places; "
        f"fairseq-generate with --beam {options.beam} on the test split; mean ± standard deviation over seeds",
        f"{options.updates:,} updates of {options.batch_size} sources, {options.layers} + {options.layers} layers of "
        f"width {options.width}, {options.heads} heads, highest learning rate {options.lr:g} for all; the checkpoint "
        "best on valid",
        *model_notes(options.models),
        "milliseconds to generate one target and for an update, and the largest memory of each process, libraries "
        "included: one thread of this machine, with whatever else it did",
    ]


EXPERIMENT = Experiment(
    command="recipes.long_copy.compare",
    about=__doc__.splitlines()[0],
    options=LongCopy,
    title="Long copy with one budget",
    columns=(
        MODEL,
        PARAMETERS,
        *(Column(name, mean(name, 1)) for name in ("next", "exact", "passages", "tokens")),
        SEEDS,
        Column("ms/target", median("milliseconds")),
        Column("MiB generating", largest("generate_bytes", 2**-20)),
        Column("ms/update", median("seconds_per_update", 1000)),
        PEAK._replace(header="MiB training"),
    ),
    notes=notes,
    prepare=lambda options: Data(prepare.prepare(options.file, options.out, options.data), {}),
    read=read,
    evaluate=generate,
    picture=Picture(
        curve="curve",
        across="milliseconds",
        up="tokens",
        filled=reads_source_in_one_state,
        curves={
            "ylabel": "next token right, % of the valid split",
            "ylim": (0, 101),
            "title": "The right token so far is given; mean over seeds",
        },
        dots={
            "xlabel": "ms to generate a target, one thread",
            "ylabel": "tokens right, % of the test split",
            "ylim": (0, 105),
            "title": "Generated; filled: the source is kept in a state of constant size",
        },
    ),
    lacking="failed",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
