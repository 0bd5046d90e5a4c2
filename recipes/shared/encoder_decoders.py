"""Experiments with encoder-decoders: names of models, options, what a trained model generates, and its record."""

import argparse
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fairseq.models import ARCH_MODEL_REGISTRY

from common.attention import ATTENTIONS
from fairseq_plugin import LinearTimeTransformer

from .architectures import option_prefix
from .commands import python_command, run
from .comparison import NO_READER
from .experiment import Budget, Data, Record, option, shell_words
from .json_files import read_json, write_json
from .trainings import read_points
from .variants import mechanism_of, variant_arguments, variant_notes, with_variants

#: File in the folder of a training: the scores of what its model generated.
GENERATED = "generated.json"
#: fairseq's own model; all others are called NAME/CROSS.
STOCK = "transformer"
CROSS_ATTENTIONS = ("softmax", *(name for name, kind in ATTENTIONS.items() if "source" in kind.supports))


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


def models_option(default: Sequence[str]) -> Any:
    """The field ``models`` of options."""
    about = f"attention, and attention of the decoder to the encoder; or {STOCK}, fairseq's own; default: %(default)s"
    return option(tuple(default), about, setting=False, nargs="+", type=model, metavar="NAME/CROSS")


def attention_arguments(name: str) -> list[object]:
    """The architecture of a model, with its cross-attention."""
    if name == STOCK:
        return ["--arch", STOCK]
    model = parse(name)
    prefix = option_prefix(model.attention)
    arguments = ["--arch", model.attention, "--lineartime-cross-attention", model.cross]
    return [*arguments, *variant_arguments(model.decoder, prefix)]


@dataclass(frozen=True, kw_only=True)
class EncoderDecoders(Budget, ABC):
    """The options of encoder-decoders with ``layers`` in the encoder, and as many in the decoder."""

    most_evaluations: ClassVar[int] = 10
    label_smoothing: ClassVar[float] = 0.0
    #: The NamedTuple that ``count`` returns.
    counted: ClassVar[type]

    models: Sequence[str] = models_option((STOCK,))
    updates: int = option(4_000, "of every training (%(default)s)", quick=4)
    beam: int = option(1, "of fairseq-generate; 1 is greedy (%(default)s)")
    layers: int = option(1)
    heads: int = option(4)
    more: Sequence[str] = option((), "further arguments of fairseq-train", type=shell_words, metavar="ARGUMENTS")

    @property
    @abstractmethod
    def languages(self) -> tuple[str, str]:
        """The names of source and target in the files of the data."""

    @abstractmethod
    def batch_arguments(self) -> list[object]:
        """The size of a batch of training."""

    @abstractmethod
    def longest_arguments(self) -> list[object]:
        """The longest source and target, for fairseq-train and fairseq-generate."""

    @abstractmethod
    def generate_arguments(self) -> list[object]:
        """The size of a batch, the longest targets, and other arguments of fairseq-generate."""

    @abstractmethod
    def count(self, lines: Sequence[str]) -> Any:
        """The scores, and the time, in a log of fairseq-generate."""

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """The arguments of fairseq-train for a model and a seed, without the folder of checkpoints."""
        return [
            data,
            *self.model_arguments(name),
            *self.update_arguments(seed),
            *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", self.label_smoothing),
            *("--report-accuracy", "--lr-scheduler", "cosine", "--warmup-updates", max(1, self.updates // 16)),
            *self.batch_arguments(),
            *self.more,
        ]

    def model_arguments(self, name: str) -> list[object]:
        """The arguments from which a model is built."""
        source, target = self.languages
        arguments = [
            *"--user-dir fairseq_plugin --task translation".split(),
            *("--source-lang", source, "--target-lang", target, *attention_arguments(name)),
        ]
        for side in ("encoder", "decoder"):
            arguments += [f"--{side}-layers", self.layers, f"--{side}-attention-heads", self.heads]
            arguments += [f"--{side}-embed-dim", self.width, f"--{side}-ffn-embed-dim", 2 * self.width]
            arguments += [f"--{side}-normalize-before"]
        # A short training repeats little, so it needs no dropout.
        return [*arguments, *self.longest_arguments(), *"--share-all-embeddings --dropout 0.0".split()]

    def generate_command(self, data: Path, checkpoint: Path) -> list[str]:
        """fairseq-generate of the test split."""
        return python_command(
            *("-m", "fairseq_cli.generate", data, "--user-dir", "fairseq_plugin", "--path", checkpoint),
            *("--gen-subset", "test", "--required-batch-size-multiple", 1, "--beam", self.beam),
            *self.generate_arguments(),
            *self.longest_arguments(),
            *(*NO_READER, "--log-format", "none"),
        )


def generate(options: EncoderDecoders, data: Data, folder: Path) -> None:
    """Let the model in ``folder`` generate, and store its scores there, unless they are stored already.

    Raises:
        CommandFailed: fairseq-generate failed.
    """
    if not (folder / GENERATED).exists():
        log = folder / "generate.log"
        checkpoint = folder / "checkpoints" / "checkpoint_best.pt"
        finished = run(options.generate_command(data.folder, checkpoint), log, threads=1)
        counted = options.count(log.read_text(encoding="utf-8").splitlines())
        write_json(folder / GENERATED, {"counted": counted._asdict(), "peak_bytes": finished.peak_bytes})


def read(options: EncoderDecoders, folder: Path, known: Record) -> Record | None:
    """The results of a complete training and of what its model generated; None before it has generated."""
    if not (folder / GENERATED).exists():
        return None
    generated = read_json(folder / GENERATED, counted=options.counted, peak_bytes=int)
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


def model_notes(models: Sequence[str]) -> list[str]:
    """Notes on the names of ``models``, for below a table."""
    return [
        "NAME/CROSS: attention of encoder and decoder, and attention of the decoder to the encoder; transformer is "
        "fairseq's own",
        *variant_notes(list(models)),
    ]
