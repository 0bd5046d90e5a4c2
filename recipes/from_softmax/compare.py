"""Make linear-time language models of a trained softmax one, in every form, and print what of its lead they win back.

``python -m recipes.from_softmax.compare --file FILE --seeds 3`` from the checkout's root: a teacher is trained for each
seed, its attention is exchanged, and the exchanged models are trained in two stages and from scratch, all through
fairseq-train. Another run continues where the last one stopped.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.files import tensor_files
from fairseq_plugin.convert import convert

from ..shared.comparison import PlannedTraining, Results, read_complete, train_and_read
from ..shared.experiment import Data, Record, option
from ..shared.json_files import measured
from ..shared.language_models import LIMIT_HELP, WHOLE, LanguageModels, prepare
from ..shared.scripts import fraction, positive_int
from ..shared.trainings import Training, TrainingResult, read_parameters
from ..shared.working_folder import atomic_write
from .measuring import changed_parameters, load, losses, losses_of_parts
from .needles import check_copies, distances, write_mixed
from .reach import Contexts, Reach, measure, overrides, read_contexts
from .reach_report import draw_found, draw_lengths, reach_tables
from .results import TEST, Measure, Panel, experiment, with_shares
from .stages import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED, Stages, folder_name

COMMAND = "recipes.from_softmax.compare"
#: The folder of the text with needles.
MIXED = "needles-bin"
#: The checkpoint that a training leaves.
LAST = Path("checkpoints") / "checkpoint_last.pt"
#: Files in the folder of a training: the losses of its checkpoint, at the start of stage 1, of parts after stage 2.
_LOSSES, _EXCHANGED, _PARTS = "losses.json", "exchanged.json", "parts.json"
#: How far back the checkpoint reads, and the one at the start of stage 1.
_REACH, _EXCHANGED_REACH = "reach.json", "exchanged_reach.json"
_BY_POSITION = "perplexity by position; thin: untrained"


@dataclass(frozen=True, kw_only=True)
class Conversion(Stages, LanguageModels):
    """The options of a teacher, which is trained for ``updates``, and of its conversion."""

    #: Checkpoints during a training. An interruption costs at most the updates between two of them.
    most_evaluations: ClassVar[int] = 4

    # With --quick too the test text is longer than the windows.
    limit: int | None = option(None, LIMIT_HELP, quick=1_000, setting=False, type=positive_int, metavar="LINES")
    layers: int = option(4)
    updates: int = option(2_000, "of the teacher (%(default)s)", quick=20)
    needles: int = option(
        0,
        "copies of a needle in each sequence of all trainings, at least 2, so that models can learn to find needles; "
        "default: none",
    )
    times: int = option(8, "windows for perplexity by position, in training lengths (%(default)s)", quick=2)
    windows: int = option(48, "of the test text, at most (%(default)s)")
    window_dropout: float = option(
        0.5,
        "how often in stage 1 the linear part of a form with a window learns by itself (%(default)s)",
        type=fraction,
    )

    def completed(self) -> "Conversion":
        """The options; ValueError if a number or a form is invalid."""
        self.check_batch()
        self.check(self.updates, "--updates")
        if self.needles:
            check_copies(self.needles, self.tokens_per_sample)
        return self

    @property
    def longest(self) -> int:
        """Tokens of the windows in which perplexity is measured by position."""
        return self.times * self.tokens_per_sample

    def planned(self, stage: str, name: str, seed: int, data: Path, runs: Path) -> PlannedTraining:
        """The training of the teacher, or of a form in a stage or from scratch; ``runs`` has the folders of all."""
        before = {
            TRANSFERRED: start_path(runs, name, seed),
            DISTILLED: runs / folder_name(name, TRANSFERRED, seed) / LAST,
        }
        budget = dataclasses.replace(self, updates=self.lasts(self.updates)[stage], lr=self.rate(stage))
        arguments = [*budget.train_arguments(data, name, seed), "--disable-validation"]
        if stage in before:
            teacher = runs / folder_name(TEACHER, TEACHER, seed) / LAST
            arguments += ["--finetune-from-model", before[stage], "--teacher", teacher]
            arguments += self._stage_arguments(stage, name)
        return PlannedTraining(name, seed, Training(folder_name(name, stage, seed), arguments))

    def _stage_arguments(self, stage: str, name: str) -> list[object]:
        if stage == TRANSFERRED:
            # An attention without maps of its own can learn only its projections.
            learning = "new" if self.form(name).learns_maps else "attention"
            arguments = ["--criterion", "attention_transfer", "--lineartime-trained-parameters", learning]
            if self.form(name).windowed:
                arguments += ["--transfer-window-dropout", self.window_dropout]
            return arguments
        temperature = ("--distillation-temperature", self.temperature)
        return ["--criterion", "distillation", *temperature, "--distillation-weight", self.weight]

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of the teacher, or of a form with its options."""
        if name == TEACHER:
            return ["--arch", "transformer_lm", "--decoder-normalize-before"]
        return ["--arch", "hybrid_lm", *self.form(name).arguments()]


def start_path(runs: Path, name: str, seed: int) -> Path:
    """The teacher of a seed with the attention of a form, without training."""
    return runs / f"{folder_name(name, EXCHANGED, seed)}.pt"


class Trainings:
    """The trainings of an experiment in its folder, with their conversions and measurements, one seed after another."""

    def __init__(self, options: Conversion, data: Data) -> None:
        self.options, self.data, self.runs = options, data.folder, options.out / "runs"
        self.learned_from = options.out / MIXED if options.needles else data.folder
        self.contexts = _contexts(options, data.folder)
        self._complete: dict[tuple[str, int], dict[str, Record]] = {}  # by model and seed, then by stage
        self._failed: dict[str, str] = {}
        self._missing, self._interrupted = 0, False

    def run(self) -> Results:
        """Train and measure what is missing; returns the records of the teachers, and of each form and seed."""
        seeds = range(1, self.options.seeds + 1)
        for seed in seeds:
            if self._train(TEACHER, [TEACHER], seed):
                transferred = self._train(TRANSFERRED, self.options.models, seed)
                self._train(DISTILLED, transferred, seed)
                if not self.options.no_scratch:
                    self._train(SCRATCH, self.options.models, seed)
        teachers = {seed: self._teacher(seed) for seed in seeds if (TEACHER, seed) in self._complete}
        forms = [(name, seed) for name in self.options.models for seed in teachers if (name, seed) in self._complete]
        records = [self._record(name, seed, teachers[seed]["losses"]) for name, seed in forms]
        return Results([*teachers.values(), *records], self._failed, self._missing, self._interrupted)

    def _train(self, stage: str, names: Sequence[str], seed: int) -> list[str]:
        """Train, or only read the results after an interruption; returns the names that are complete."""
        if stage == TRANSFERRED and not self._interrupted:
            for name in names:
                self._exchange(name, seed)
        planned = [self.options.planned(stage, name, seed, self.learned_from, self.runs) for name in names]
        if self._interrupted:
            complete = read_complete(planned, self.runs, self._read)
            compared = Results(complete, {}, len(planned) - len(complete), True)
        else:
            compared = train_and_read(planned, self.runs, self.options.jobs, self._read)
        for record in compared.outcomes:
            self._complete.setdefault((record["model"], seed), {})[stage] = record
        self._failed |= compared.failed
        self._missing += compared.missing
        self._interrupted = compared.interrupted
        return [record["model"] for record in compared.outcomes]

    def _read(self, name: str, seed: int, folder: Path, trained: TrainingResult) -> Record:
        return {
            "model": name,
            "seed": seed,
            "losses": measured(folder / _LOSSES, lambda: losses(folder / LAST, self.data), dict[str, float]),
            "parameters": read_parameters(folder),
            "seconds": trained.seconds,
            "command": trained.command,
        }

    def _exchange(self, name: str, seed: int) -> None:
        """Write the teacher with the attention of a form, unless the file exists."""
        path = start_path(self.runs, name, seed)
        if not path.exists():
            teacher = self._folder(TEACHER, TEACHER, seed) / LAST
            converted, _ = convert(teacher, "hybrid_lm", self.options.form(name).overrides())
            with atomic_write(path) as part:
                tensor_files.save(converted, part)

    def _teacher(self, seed: int) -> Record:
        """The record of the teacher of a seed."""
        folder = self._folder(TEACHER, TEACHER, seed)
        return self._complete[TEACHER, seed][TEACHER] | {
            "reach": {TEACHER: self._reach(folder / LAST, folder / _REACH, None)}
        }

    def _reach(self, checkpoint: Path, stored: Path, name: str | None) -> Record:
        """How far back a checkpoint of the form ``name``, None for the teacher, reads; measured once and stored."""
        form = None if name is None else self.options.form(name)

        def measured_now() -> Record:
            model, _ = load(checkpoint, self.data, **overrides(form, self.contexts))
            return measure(model, form, self.contexts, stored.parent.name)._asdict()

        return measured(stored, measured_now, Reach).as_record()

    def _record(self, name: str, seed: int, teacher: dict[str, float]) -> Record:
        """The record of a form for a seed, if at least one of its stages is trained."""
        stages = self._complete[name, seed]
        losses_of_stages = {stage: training["losses"] for stage, training in stages.items()}
        learned, parts, reach = 0, {}, {}
        if TRANSFERRED in stages:
            start, first = start_path(self.runs, name, seed), self._folder(name, TRANSFERRED, seed)
            exchanged = measured(first / _EXCHANGED, lambda: losses(start, self.data), dict[str, float])
            losses_of_stages[EXCHANGED] = exchanged
            reach[EXCHANGED] = self._reach(start, first / _EXCHANGED_REACH, name)
            learned = changed_parameters(start, first / LAST)
        second = self._folder(name, DISTILLED, seed)
        if DISTILLED in stages:
            reach[DISTILLED] = self._reach(second / LAST, second / _REACH, name)
        if DISTILLED in stages and self.options.form(name).windowed:
            kind = dict[str, dict[str, float]]
            parts = measured(second / _PARTS, lambda: losses_of_parts(second / LAST, self.data), kind)
        record = {
            "model": name,
            "seed": seed,
            "parameters": next(iter(stages.values()))["parameters"],
            "learned": learned,
            "teacher": teacher,
            "losses": losses_of_stages,
            "parts": parts,
            "reach": reach,
            "seconds": {stage: training["seconds"] for stage, training in stages.items()},
            "commands": {stage: training["command"] for stage, training in stages.items()},
        }
        return with_shares(record)

    def _folder(self, name: str, stage: str, seed: int) -> Path:
        return self.runs / folder_name(name, stage, seed)


def _contexts(options: Conversion, data: Path) -> Contexts:
    return read_contexts(data, options.tokens_per_sample, options.longest, options.windows)


def prepare_text(options: Conversion) -> Data:
    """The text in tokens, as ``language_models.prepare`` makes it, and with ``--needles`` a copy that has some.

    The facts also have the ``distances`` of needles, the number of ``windows``, and from how many symbols, ``choices``,
    a needle is drawn.

    Raises:
        ValueError: see ``prepare``, or the test text is too short for the windows.
    """
    data, length = prepare(options), options.tokens_per_sample
    if options.needles:
        write_mixed(data.folder, options.out / MIXED, length, options.needles, COMMAND)
    contexts = _contexts(options, data.folder)
    found = {"distances": distances(length), "windows": len(contexts.windows), "choices": contexts.choices}
    return Data(data.folder, {**data.facts, **found})


def teacher_notes(options: Conversion, facts: Record) -> list[str]:
    """Notes below the table of the teacher."""
    splits = ", ".join(f"{count:,} {split}" for split, count in facts["tokens"].items())
    return [
        f"transformer_lm, pre-norm, {options.layers} layers of width {options.width}, {options.heads} heads, sinusoids "
        f"as positions; updates of {options.batch_tokens:,} {facts['unit']} in sequences of "
        f"{options.tokens_per_sample:,}, highest learning rate {options.lr:g}; tokens: {splits}",
        "perplexity of the last checkpoint in sequences of that length, mean ± standard deviation over seeds",
    ]


def notes(options: Conversion, facts: Record) -> list[str]:
    """Notes below the table of the forms."""
    lasts = options.lasts(options.updates)
    return [
        f"perplexity of the test text ({facts['unit']}), mean ± standard deviation over seeds, each with a teacher of "
        "its own",
        "exchanged: the teacher's weights under another attention, before any update; stage 1: attention transfer, "
        f"{lasts[TRANSFERRED]:,} updates, learning rate {options.transfer_lr:g}; stage 2: distillation, "
        f"{lasts[DISTILLED]:,} updates, learning rate {options.distillation_lr:g}, temperature "
        f"{options.temperature:g}, weight {options.weight:g}; from scratch: {lasts[SCRATCH]:,} updates, learning rate "
        f"{options.lr:g}",
        "won back: (exchanged - converted) / (exchanged - teacher) in log perplexity; from scratch, %: the same of the "
        "model that is trained from scratch",
        "stage 1 teaches maps where each linear layer has some, else the projections of its attention",
        f"{options.window_note()}; lolcats with --transfer-window-dropout {options.window_dropout:g} in stage 1",
        "seconds of fairseq-train, both stages, the teacher's forward passes included: on one thread of this machine, "
        "with whatever else it did",
    ]


EXPERIMENT = experiment(
    Measure(
        columns={"valid": "perplexity, valid text", TEST: "perplexity, test text"},
        label="perplexity, test text",
        of=math.exp,
        whole=lambda options: f"{options.updates:,} updates",
        teacher_notes=teacher_notes,
        notes=notes,
        tables=reach_tables,
        panels=(Panel("needles found, %; thin: untrained", draw_found), Panel(_BY_POSITION, draw_lengths)),
    ),
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=Conversion,
    prepare=prepare_text,
    train=lambda options, data: Trainings(options, data).run(),
    whole={**WHOLE, MIXED: COMMAND},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
