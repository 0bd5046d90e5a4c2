"""Train every encoder-decoder to copy marked passages from long sources, with one budget; print what each gets right.

``python -m recipes.long_copy.compare --file FILE --seeds 3`` from the checkout's root, through fairseq-train and
fairseq-generate. Another run continues where the last one stopped.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from fairseq.models import ARCH_MODEL_REGISTRY

from common.attention import ATTENTIONS
from fairseq_plugin import LinearTimeTransformer

from ..shared.architectures import option_prefix
from ..shared.commands import python_command, run
from ..shared.comparison import MODEL, NO_READER, SEEDS, Column
from ..shared.experiment import (
    PARAMETERS,
    PEAK,
    Budget,
    Data,
    Experiment,
    Picture,
    Record,
    largest,
    mean,
    median,
    option,
    shell_words,
)
from ..shared.json_files import read_json, write_json
from ..shared.trainings import read_points
from ..shared.variants import mechanism_of, variant_arguments, variant_notes, with_variants
from . import prepare
from .generated import Counted, count
from .passages import Layout
from .prepare import SOURCE, TARGET

#: File in the folder of a training: the accuracy of the targets that its model generated.
GENERATED = "generated.json"
#: fairseq's own model; all others are called NAME/CROSS.
STOCK = "transformer"
CROSS_ATTENTIONS = ("softmax", *(name for name, kind in ATTENTIONS.items() if "source" in kind.supports))
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


class Model(NamedTuple):
    """The mechanisms in the name of a model, see ``parse``."""

    attention: str  # the encoder's, and the decoder's self-attention
    cross: str  # the decoder's cross-attention
    decoder: str  # ``attention`` with our additions, which only the decoder's self-attention has


def attentions() -> list[str]:
    """The mechanisms that fairseq has an encoder-decoder architecture of."""
    kinds = ((name, ARCH_MODEL_REGISTRY.get(name)) for name in ATTENTIONS)
    return [name for name, kind in kinds if kind is not None and issubclass(kind, LinearTimeTransformer)]


def parse(name: str) -> Model:
    """The parts of NAME/CROSS, or NAME+forget/CROSS and so on.

    Raises:
        ValueError: there is no such model.
    """
    decoder, slash, cross = name.partition("/")
    plain = mechanism_of(decoder)
    if not slash or plain not in attentions() or cross not in CROSS_ATTENTIONS:
        raise ValueError(
            f"{name}; allowed: {STOCK}, and NAME/CROSS with NAME of {', '.join(attentions())} and CROSS of "
            f"{', '.join(CROSS_ATTENTIONS)}"
        )
    if decoder not in with_variants(plain):
        allowed = ", ".join(f"{known}/{cross}" for known in with_variants(plain))
        raise ValueError(f"{name}; allowed: {allowed}")
    return Model(plain, cross, decoder)


def reads_source_in_one_state(name: str) -> bool:
    """Whether the model decodes from a state of the source that has the same size for every source."""
    return name != STOCK and parse(name).cross != "softmax"


def model(name: str) -> str:
    """The type of ``--models``: the name of a model.

    Raises:
        argparse.ArgumentTypeError: there is no such model.
    """
    try:
        if name != STOCK:
            parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def attention_arguments(name: str) -> list[object]:
    """The architecture of a model, with its cross-attention."""
    if name == STOCK:
        return ["--arch", STOCK]
    model = parse(name)
    prefix = option_prefix(model.attention)
    arguments = ["--arch", model.attention, "--lineartime-cross-attention", model.cross]
    return [*arguments, *variant_arguments(model.decoder, prefix)]


@dataclass(frozen=True, kw_only=True)
class LongCopy(Budget):
    """The options of encoder-decoders with ``layers`` in the encoder, and as many in the decoder."""

    most_evaluations: ClassVar[int] = 10

    file: Path = option(None, "any text in UTF-8", setting=False, type=Path, required=True)
    source_tokens: int = option(2048, "of each source (%(default)s)", quick=64, setting=False)
    spans: int = option(16, "marked passages of a source, one in each equal part (%(default)s)", quick=2, setting=False)
    span_tokens: int = option(1, "of each passage (%(default)s)", quick=3, setting=False)
    train: int = option(32_000, "examples to train on (%(default)s)", quick=40, setting=False)
    valid: int = option(200, "examples to select a checkpoint (%(default)s)", quick=4, setting=False)
    test: int = option(200, "examples to generate from (%(default)s)", quick=4, setting=False)
    models: Sequence[str] = option(
        DEFAULT_MODELS,
        f"attention, and attention of the decoder to the encoder; or {STOCK}, fairseq's own; default: %(default)s",
        setting=False,
        nargs="+",
        type=model,
        metavar="NAME/CROSS",
    )
    updates: int = option(4_000, "of every training (%(default)s)", quick=4)
    beam: int = option(1, "of fairseq-generate; 1 is greedy (%(default)s)")
    batch_size: int = option(8)
    layers: int = option(1)
    heads: int = option(4)
    more: Sequence[str] = option((), "further arguments of fairseq-train", type=shell_words, metavar="ARGUMENTS")

    @property
    def data(self) -> prepare.Data:
        """The settings of the data."""
        layout = Layout(self.source_tokens, self.spans, self.span_tokens)
        return prepare.Data(layout, {"train": self.train, "valid": self.valid, "test": self.test}, 1)

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """The arguments of fairseq-train for a model and a seed, without the folder of checkpoints."""
        return [
            data,
            *self.model_arguments(name),
            *self.update_arguments(seed),
            *"--criterion label_smoothed_cross_entropy --label-smoothing 0.0 --report-accuracy".split(),
            *("--lr-scheduler", "cosine", "--warmup-updates", max(1, self.updates // 16)),
            *("--batch-size", self.batch_size),
            *self.more,
        ]

    def model_arguments(self, name: str) -> list[object]:
        """The arguments from which a model is built."""
        arguments = [
            *"--user-dir fairseq_plugin --task translation".split(),
            *("--source-lang", SOURCE, "--target-lang", TARGET, *attention_arguments(name)),
        ]
        for side in ("encoder", "decoder"):
            arguments += [f"--{side}-layers", self.layers, f"--{side}-attention-heads", self.heads]
            arguments += [f"--{side}-embed-dim", self.width, f"--{side}-ffn-embed-dim", 2 * self.width]
            arguments += [f"--{side}-normalize-before"]
        # A short training repeats little, so it needs no dropout.
        return [*arguments, *self.longest_arguments(), *"--share-all-embeddings --dropout 0.0".split()]

    def longest_arguments(self) -> list[object]:
        """The longest source and target, each with </s>. fairseq-generate needs them too: its default is 1,024."""
        longest = (self.data.layout.source_tokens + 1, self.data.layout.target_tokens + 1)
        return ["--max-source-positions", longest[0], "--max-target-positions", longest[1]]

    def generate_command(self, data: Path, checkpoint: Path) -> list[str]:
        """fairseq-generate of the test split, one source at a time; no target is longer than the right one."""
        return python_command(
            *("-m", "fairseq_cli.generate", data, "--user-dir", "fairseq_plugin", "--path", checkpoint),
            *("--gen-subset", "test", "--batch-size", 1, "--required-batch-size-multiple", 1, "--beam", self.beam),
            *("--max-len-a", 0, "--max-len-b", self.data.layout.target_tokens),
            *self.longest_arguments(),
            *(*NO_READER, "--log-format", "none"),
        )


def generate(options: LongCopy, data: Data, folder: Path) -> None:
    """Let the model in ``folder`` generate, and store its accuracy there, unless it is stored already.

    Raises:
        CommandFailed: fairseq-generate failed.
    """
    if not (folder / GENERATED).exists():
        log = folder / "generate.log"
        checkpoint = folder / "checkpoints" / "checkpoint_best.pt"
        finished = run(options.generate_command(data.folder, checkpoint), log, threads=1)
        counted = count(log.read_text(encoding="utf-8").splitlines(), options.span_tokens)
        write_json(folder / GENERATED, {"counted": counted._asdict(), "peak_bytes": finished.peak_bytes})


def read(options: LongCopy, folder: Path, known: Record) -> Record | None:
    """The results of a complete training and of what its model generated; None before it has generated."""
    if not (folder / GENERATED).exists():
        return None
    generated = read_json(folder / GENERATED, counted=Counted, peak_bytes=int)
    points = read_points(folder)
    valid = [point for point in points if point.split == "valid"]
    best = min(valid, key=lambda point: point.values["loss"])
    speeds = [point.values["ups"] for point in points if point.split == "train_inner"]
    return {
        "update": best.update,  # of the best checkpoint on valid
        "next": best.values["accuracy"],
        "curve": [(point.update, point.values["accuracy"]) for point in valid],
        **generated["counted"]._asdict(),
        "seconds_per_update": 1.0 / statistics.median_high(speeds),
        "generate_bytes": generated["peak_bytes"],
    }


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
        "NAME/CROSS: attention of encoder and decoder, and attention of the decoder to the encoder; transformer is "
        "fairseq's own",
        *variant_notes(options.models),
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
