"""Train the paper's models on any text, and show perplexity, its cost and seconds per step at several lengths.

``python -m recipes.flash.compare --file any.txt`` from the checkout's root, through fairseq-train, with equal numbers
of parameters, updates and tokens per update; ``--figure 5`` compares what the paper's Figure 5 does, and draws it so.
Run again, it goes on where it was interrupted.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..shared import fairseq_log
from ..shared.commands import python_command, run
from ..shared.comparison import NO_READER, PlannedTraining
from ..shared.download import file_sha256
from ..shared.experiment import Data, Experiment, Options, Record, option
from ..shared.fairseq_training import last_validation
from ..shared.json_files import read_json
from ..shared.scripts import positive_int
from ..shared.subword_data import WRITER, Settings, cut_trial, to_data_bin
from ..shared.trainings import Training
from .measurements import extra_tables, not_measured, perplexity_columns, perplexity_notes
from .models import ALL_MODELS, DEFAULT_MODELS, FIGURES, MASKED_MODELS, MODELS, SHAPE, Shape, masked_name
from .report import draw

COMMAND = "recipes.flash.compare"
#: The default folder; that of a figure has its number.
FOLDER = Path("work/flash/compare")
LENGTHS, QUICK_LENGTHS = [512, 1024, 2048, 4096], [512, 1024]
TOKENS_PER_UPDATE = 4096
#: Log lines of a training: enough for a median without the first one, too few to cost time.
_LOG_POINTS = 20
#: Evaluations during a training, for the curve of perplexity, as far as there are updates enough between them.
EVALUATIONS, _LEAST_UPDATES = 10, 10


def numbers(text: str) -> list[int]:
    """Comma-separated lengths, none twice."""
    return sorted({positive_int(item) for item in text.split(",")})


def architectures(text: str) -> list[str]:
    """Comma-separated models, none twice; all causal or all masked."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in ALL_MODELS:
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(ALL_MODELS)}")
    if len({ALL_MODELS[name].masked for name in names}) > 1:
        raise argparse.ArgumentTypeError(f"{text}; allowed: causal models alone, or masked ones (_mlm) alone")
    return names


@dataclass(frozen=True, kw_only=True)
class FlashModels(Options):
    """The options: models and lengths, and the size, budget and batch of every model."""

    out: Path = option(FOLDER, "default: %(default)s, or work/flash/figure_N", setting=False, type=Path)
    file: Path = option(None, "any text in UTF-8, from about 1 MB on", setting=False, type=Path, required=True)
    models: Sequence[str] = ()
    figure: int | None = option(
        None, "of the paper: its models and lengths, drawn as there", setting=False, type=int, choices=tuple(FIGURES)
    )
    masked: bool = option(False, "masked language models, as in Figure 5", setting=False)
    lengths: list[int] | None = option(
        None, f"default: {','.join(map(str, LENGTHS))}, or the figure's", setting=False, type=numbers
    )
    archs: list[str] | None = option(
        None, f"of {', '.join(MODELS)}; or _mlm for _lm", setting=False, type=architectures
    )
    jobs: int = option(1, "trainings at a time, each with torch's default threads (%(default)s)", setting=False)
    updates: int = option(150, "of every model (%(default)s)", quick=10)
    seeds: int = option(1, "trainings of each model (%(default)s)", setting=False)
    tokens_per_update: int | None = option(
        None, f"default: {TOKENS_PER_UPDATE}, or the longest of --lengths if that is more", type=positive_int
    )
    width: int = option(SHAPE.width, "of every model (%(default)s)")
    layers: int = option(SHAPE.layers, "of every model (%(default)s)")
    heads: int = option(SHAPE.heads, "of every model (%(default)s)")
    vocabulary: int = option(2000, "subwords (%(default)s)")
    steps: Path | None = option(
        None, "results.json of recipes.flash.speed, for seconds of models in turns", setting=False, type=Path
    )

    @property
    def shape(self) -> Shape:
        """The size of every model that has none of its own."""
        return Shape(self.width, self.layers, self.heads)

    def completed(self) -> "FlashModels":
        """The options with the models and lengths that ``--archs``, ``--figure`` and ``--masked`` name.

        Raises:
            ValueError: options that contradict each other, a value that is not allowed, or no text.
        """
        figure = FIGURES.get(self.figure)
        lengths = self.lengths or (QUICK_LENGTHS if self.quick else LENGTHS if figure is None else figure.lengths)
        tokens = self.tokens_per_update or max(TOKENS_PER_UPDATE, lengths[-1])
        models = self._models()
        if lengths[-1] > tokens:
            raise ValueError(f"--lengths has {lengths[-1]}; allowed: at most --tokens-per-update, {tokens}")
        if self.updates < 3:
            raise ValueError(f"--updates is {self.updates}; allowed: at least 3, for a speed")
        if self.width % (2 * self.heads) or self.width % 4:
            raise ValueError(f"--width is {self.width}; allowed: a multiple of 4, and of twice --heads, {self.heads}")
        masked = ALL_MODELS[models[0]].masked
        out = FOLDER.with_name(f"figure_{self.figure}") if figure is not None and self.out == FOLDER else self.out
        return replace(self, out=out, models=models, lengths=lengths, tokens_per_update=tokens, masked=masked)

    def _models(self) -> list[str]:
        if self.archs is not None:
            if self.figure is not None:
                raise ValueError(f"--archs is given; allowed: without --figure, which is {self.figure}")
            if self.masked and self.archs[0] in MODELS:
                raise ValueError(f"--archs has {self.archs[0]}; allowed with --masked: {', '.join(MASKED_MODELS)}")
            return list(self.archs)
        figure = FIGURES.get(self.figure)
        if self.masked and figure is not None and figure.masked is False:
            raise ValueError(f"--masked is given; allowed with --figure {self.figure}: not given")
        names = DEFAULT_MODELS if figure is None else figure.models
        masked = self.masked or (figure is not None and figure.masked)
        return [masked_name(name) if masked else name for name in names]

    def settings(self) -> Record:
        """See ``Options``; lengths may be added later, too."""
        file = Path(self.file)  # a text in stored results
        return {**super().settings(), "file": file.name, "text_sha256": file_sha256(file) if file.is_file() else None}

    def as_dict(self) -> Record:
        """See ``Options``."""
        return {**super().as_dict(), "lengths": self.lengths, "figure": self.figure, "masked": self.masked}


def equal_widths(options: FlashModels, data: Path) -> dict[str, int]:
    """Model -> the inner width that gives it as many parameters as the others; without those of a size of their own.

    Raises:
        CommandFailed: no inner width does.
    """
    names = [name for name in options.models if ALL_MODELS[name].shape is None]
    if not names:
        return {}
    # A process of its own, like every training, so that this one does not hold torch's memory.
    log = options.out / "logs" / "widths.log"
    command = python_command("-m", "recipes.flash.widths", data, "--length", options.lengths[0])
    size = [word for name, value in options.shape._asdict().items() for word in (f"--{name}", str(value))]
    run([*command, *size, "--archs", *names], log)
    return json.loads(log.read_text(encoding="utf-8").splitlines()[-1])


def read_steps(options: FlashModels) -> list[Record]:
    """The records in the file ``steps``; none without a file.

    Raises:
        ValueError: no such results, of models of another size, or without a model at a length.
    """
    if options.steps is None:
        return []
    content = read_json(options.steps, "results.json of python -m recipes.flash.speed", plan=dict, results=list)
    for name in ("width", "layers", "heads", "vocabulary"):
        if content["plan"].get(name) != getattr(options, name):
            allowed = f"{content['plan'].get(name)}, that of --steps {options.steps}"
            raise ValueError(f"--{name} is {getattr(options, name)}; allowed: {allowed}")
    timed = {(record["model"], record["length"]) for record in content["results"]}
    for case in itertools.product(options.models, options.lengths):
        if case not in timed:
            raise ValueError(f"--steps {options.steps} has no {case[0]} at {case[1]}; allowed: all models and lengths")
    return content["results"]


def prepare(options: FlashModels) -> Data:
    """The text in subwords; facts are what each split of the ``text`` has, inner ``widths`` of models, and ``steps``.

    Raises:
        CommandFailed, ValueError: the text could not be prepared, or is shorter than the longest sequence.
    """
    if not options.file.is_file():
        raise ValueError(f"--file is {options.file}, which is no file; allowed: a text file")
    text = cut_trial(options.file, options.out / "raw", None)
    counts = to_data_bin(text, options.out, Settings(options.vocabulary))
    if counts["valid"].tokens < max(options.lengths):
        raise ValueError(
            f"--file has {counts['valid'].tokens:,} tokens in its valid part; allowed: at least the longest of"
            f" --lengths, {max(options.lengths):,}"
        )
    data = options.out / "data-bin"
    text = {split: {**count._asdict(), "tokens_per_word": count.tokens_per_word} for split, count in counts.items()}
    return Data(data, {"text": text, "widths": equal_widths(options, data), "steps": read_steps(options)})


def train_arguments(options: FlashModels, data: Data, name: str, length: int, seed: int) -> list[object]:
    """fairseq-train with the paper's optimiser, a learning rate for few updates, and evaluations on the way."""
    updates = options.updates
    return [
        *(data.folder, "--user-dir", "fairseq_plugin"),
        *("--task", "masked_lm" if options.masked else "language_modeling"),
        *(("--criterion", "masked_lm") if options.masked else ()),
        *options.shape.arguments(name, data.facts["widths"].get(name)),
        *("--tokens-per-sample", length, "--sample-break-mode", "none", "--max-tokens", options.tokens_per_update),
        *NO_READER,
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-06", "--weight-decay", "0.01"),
        *("--clip-norm", "0.1" if ALL_MODELS[name].clipped else "0"),
        *("--lr", "0.003", "--lr-scheduler", "polynomial_decay", "--end-learning-rate", "0"),
        *("--warmup-updates", max(1, updates // 10), "--total-num-update", updates),
        *("--max-update", updates, "--validate-interval", 1_000_000),
        *("--validate-interval-updates", max(_LEAST_UPDATES, updates // EVALUATIONS)),
        *("--no-save", "--seed", seed, "--log-interval", max(1, updates // _LOG_POINTS // 2)),
    ]


def planned(options: FlashModels, data: Data) -> list[PlannedTraining]:
    """Every model at every length with every seed; all with one seed before any with the next."""
    return [
        PlannedTraining(
            name,
            seed,
            Training(f"{name}.{length}.{seed}", train_arguments(options, data, name, length, seed), threads=None),
        )
        for seed in range(1, options.seeds + 1)
        for length in options.lengths
        for name in options.models
    ]


def read(options: FlashModels, folder: Path, known: Record) -> Record:
    """The length, the perplexity of the valid split after the last update, its curve, and the speed of a training."""
    log = folder / "train.log"
    points = fairseq_log.parse_training(log.read_text(encoding="utf-8").splitlines())
    return {
        "length": int(folder.name.rsplit(".", 2)[1]),
        "perplexity": last_validation(points, log, options.updates).values["ppl"],
        "tokens_per_second": fairseq_log.median_tokens_per_second(points),
        "curve": [(point.update, point.values["ppl"]) for point in points if point.split == "valid"],
    }


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=FlashModels,
    title="Perplexity by sequence length",
    columns=perplexity_columns,
    notes=perplexity_notes,
    prepare=prepare,
    plan=planned,
    read=read,
    measure=not_measured,
    extra_tables=extra_tables,
    picture=draw,
    picture_name="speed.png",
    whole={"data-bin": WRITER},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
