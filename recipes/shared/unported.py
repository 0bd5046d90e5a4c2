"""Language models of the areas that are not experiments yet; goes when from_softmax, long_contexts and papers are."""

import argparse
import functools
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.attention import ATTENTIONS
from common.command_parser import CommandParser

from ..wikitext103.prepare import WRITER
from .additions import GATES, NO_POSITIONS, addition_arguments, addition_notes, mechanism_of
from .architectures import option_prefix
from .comparison import Budget, Compared, Report, show, train_and_read
from .language_models import FILE_HELP, WORDS_FROM_BYTES, model_names, tokenise
from .scripts import command_line, positive_int, positive_number
from .settings import keep_settings
from .trainings import Trained, read_parameters, read_points
from .working_folder import working_folder

UPDATES, EVALUATIONS = 1_600, 8
QUICK_UPDATES, QUICK_LINES = 8, 400
_ARCHITECTURES = {"flow": "flowformer_lm"}
_REACHES = ("window", "chunk_size")


@dataclass(frozen=True, kw_only=True)
class Plan(Budget):
    """The budget of language models."""

    batch_tokens: int  # of an update
    tokens_per_sample: int
    more: list[str]  # further arguments of fairseq-train

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """See ``Budget``."""
        return [
            data,
            *self.model_arguments(name),
            *self.update_arguments(seed),
            *("--weight-decay", "0.01", "--lr-scheduler", "cosine", "--warmup-updates", max(1, self.updates // 16)),
            *("--sample-break-mode", "none", "--max-tokens", self.batch_tokens),
            *("--valid-subset", "valid,test"),  # the first one selects
            *self.more,
        ]

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that say how a model is built."""
        return [
            *("--user-dir", self.user_dir(name), "--task", "language_modeling"),
            *self.attention_arguments(name),
            *("--decoder-layers", self.layers, "--decoder-attention-heads", self.heads),
            *("--decoder-embed-dim", self.width, "--decoder-ffn-embed-dim", 4 * self.width),
            *("--decoder-input-dim", self.width, "--decoder-output-dim", self.width),
            *"--share-decoder-input-output-embed --dropout 0.0".split(),  # a short training repeats little
            *("--tokens-per-sample", self.tokens_per_sample),
        ]

    def user_dir(self, name: str) -> str:
        """Where fairseq finds the architecture of a model."""
        return "fairseq_plugin"

    def notes(self) -> list[str]:
        """Notes that explain the additions in the names of the models."""
        return addition_notes(self.models)

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of a model; its window or chunk, where it has one, is a quarter of a sequence."""
        attention = mechanism_of(name)
        architecture = _ARCHITECTURES.get(attention, f"{attention}_lm")
        prefix = option_prefix(architecture)
        arguments = ["--arch", architecture]
        described = ATTENTIONS[attention].Options.described()
        for option in _REACHES:
            if option in described and not described[option].speed_only:
                arguments += [prefix + option.replace("_", "-"), max(1, self.tokens_per_sample // 4)]
        return arguments + addition_arguments(name, prefix)


class Result(NamedTuple):
    """One complete training."""

    model: str
    seed: int
    parameters: int
    perplexity: float  # of the test text, of the checkpoint that is best on valid
    update: int  # of that checkpoint
    curve: list[tuple[int, float]]  # update and perplexity of the valid text
    tokens_per_second: float  # in training, median
    peak_bytes: int  # of the training process
    seconds: float
    command: str


class GatePlan(Plan):
    """The budget of language models, with variants of their gates."""

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that say how a model is built; those that are further named come last."""
        arguments = super().model_arguments(name.removesuffix(NO_POSITIONS))
        if name.endswith(NO_POSITIONS):
            arguments.append("--no-token-positional-embeddings")
        return arguments

    def user_dir(self, name: str) -> str:
        """The folder of our plugin, or ``gate_variants`` for a model with gates of its own."""
        return "recipes/wikitext103/gate_variants" if _gates(name) else super().user_dir(name)

    def notes(self) -> list[str]:
        """Notes that explain the additions and variants in the names of the models."""
        return super().notes()

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of a model."""
        mechanism, gates = mechanism_of(name), _gates(name)
        if gates is None:
            return super().attention_arguments(name)
        forget = addition_arguments(f"{mechanism}+forget", f"--{mechanism}-")
        return ["--arch", f"{mechanism}_gate_variant", *forget, "--gates", gates]


def _gates(name: str) -> str | None:
    """Which gates of ``gate_variants`` a model has; None for those of our plugin, or for none."""
    return next((gates for gates in GATES if gates in name.split("+")[1:]), None)


def read_result(name: str, seed: int, folder: Path, trained: Trained) -> Result:
    """A complete training; the test text's perplexity is that of the checkpoint best on valid."""
    points = read_points(folder)
    valid = {point.update: point.values["ppl"] for point in points if point.split == "valid"}
    test = {point.update: point.values["ppl"] for point in points if point.split == "test"}
    best = min(valid, key=valid.__getitem__)
    return Result(
        name,
        seed,
        read_parameters(folder),
        test[best],
        best,
        sorted(valid.items()),
        # Of four intervals one has an evaluation in it.
        statistics.median(point.values["wps"] for point in points if point.split == "train_inner"),
        trained.peak_bytes,
        trained.seconds,
        trained.command,
    )


def parser(
    command: str,
    description: str,
    known: Sequence[str] = (),
    default: Sequence[str] = (),
    takes_file: bool = True,
    updates: int = UPDATES,
) -> CommandParser:
    """The options of ``command``, which trains some models of the names ``known``, by ``default`` those, ``updates``.

    Without ``known``, ``--models`` is left to the command; without ``takes_file``, ``--file`` is.
    """
    parser = CommandParser(prog=f"python -m {command}", description=description)
    if takes_file:
        parser.add_argument("--file", type=Path, required=True, help=FILE_HELP)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--characters", action="store_true", help="a character is a token: the default for small texts")
    kinds.add_argument(
        "--words", action="store_true", help=f"a word is a token: the default from {WORDS_FROM_BYTES:,} bytes on"
    )
    kinds.add_argument("--subwords", type=positive_int, metavar="N", help="N subwords, learned from the train part")
    parser.add_argument("--limit", type=positive_int, metavar="LINES", help="only the first lines of a text file")
    out = Path("work/wikitext103") / command.rpartition(".")[2]
    parser.add_argument("--out", type=Path, default=out, help="default: %(default)s")
    if known:
        parser.add_argument(
            "--models",
            nargs="+",
            type=functools.partial(model, known=known),
            default=default,
            metavar="NAME",
            help="mechanisms, also with additions, as in NAME+forget+short_conv; default: %(default)s",
        )
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=1, help="trainings at a time, a thread each (%(default)s)")
    parser.add_argument("--updates", type=positive_int, help=f"of every training; default: {updates:,}")
    parser.set_defaults(usual_updates=updates)
    parser.add_argument(
        "--lr", type=positive_number, default=3e-3, help="highest learning rate, of all models (%(default)s)"
    )
    sizes = {"batch-tokens": 2048, "tokens-per-sample": 256, "width": 128, "layers": 2, "heads": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    parser.add_argument(
        "--more", default="", metavar="ARGUMENTS", help='of fairseq-train, as in --more "--lineartime-post-norm"'
    )
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


def model(name: str, known: Sequence[str] | None = None) -> str:
    """A name of a model, one of ``known``, or of ``model_names()`` if None.

    Raises:
        argparse.ArgumentTypeError: there is none of that name.
    """
    known = model_names() if known is None else known
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(known)}")
    return name


def compare(
    options: argparse.Namespace,
    kind: type[Plan],
    command: str,
    arguments: Sequence[str] | None,
    evaluations: int,
    shown: Callable[[Plan, dict[str, int], str, Compared], Report],
) -> int:
    """Train the models of ``options`` as a plan of this ``kind`` says, and show them; returns the exit status.

    Args:
        command: the module whose ``arguments`` the options are, and whose folder is ``--out``.
        evaluations: during each training, unless there are fewer updates.
        shown: the report of a plan, the tokens of each split, what a token is, and the outcomes.
    """
    plan = kind.chosen(
        options,
        updates=options.updates or (QUICK_UPDATES if options.quick else options.usual_updates),
        evaluations=min(evaluations, options.updates or evaluations),
        more=shlex.split(options.more),
    )
    out = options.out.absolute()
    with working_folder(out, command, whole={"data-bin": WRITER}):
        return _compare(options, plan, out, command_line(command, arguments), shown)


def _compare(options: argparse.Namespace, plan: Plan, out: Path, command: str, shown: Callable[..., Report]) -> int:
    started = time.monotonic()
    keep_settings(out / "settings.json", plan.settings())
    tokens, unit = prepare_chosen(options, out)
    compared = train_and_read(plan.trainings(out / "data-bin"), out / "runs", options.jobs, read_result)
    show(out, shown(plan, tokens, unit, compared), command, started)
    return compared.status


def prepare_chosen(options: argparse.Namespace, out: Path) -> tuple[dict[str, int], str]:
    """``prepare`` the text of ``options``; the tokens of each split, and what a token is, as "characters"."""
    size = options.file.stat().st_size if options.file.is_file() else WORDS_FROM_BYTES
    small = size < WORDS_FROM_BYTES and not (options.words or options.subwords)
    characters = options.characters or small
    unit = "characters" if characters else "subwords" if options.subwords else "words"
    limit = options.limit or (QUICK_LINES if options.quick else None)
    tokens = tokenise(options.file.absolute(), out, characters, limit, options.subwords)
    return tokens, unit
