"""Make linear-time language models of a trained softmax one, in every form, and print what of its lead they win back.

``python -m recipes.from_softmax.compare --file FILE --seeds 3`` from the checkout's root: a teacher is trained for each
seed, its attention is exchanged, and the exchanged models are trained in two stages and from scratch, all through
fairseq-train. Run again, it goes on where it was interrupted.
"""

import argparse
import functools
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import tensor_files
from common.command_parser import CommandParser
from fairseq_plugin.convert import convert

from ..shared.comparison import Compared, read_complete, show, train_and_read
from ..shared.json_files import measured
from ..shared.scripts import command_line, script
from ..shared.settings import keep_settings
from ..shared.trainings import Trained, read_parameters
from ..shared.unported import FILE_HELP, WRITER, prepare_chosen
from ..shared.unported import parser as parser_of_trainings
from ..shared.working_folder import own_file, working_folder
from .forms import add_forms, add_stages
from .measuring import changed_parameters, losses, losses_of_parts
from .plan import (
    DISTILLED,
    EXCHANGED,
    LAST,
    SCRATCH,
    TEACHER,
    TRANSFERRED,
    Conversion,
    folder_name,
    start_path,
)
from .results import TEST, Outcome, Ran, Shown, report

COMMAND = "recipes.from_softmax.compare"
UPDATES, QUICK_UPDATES = 2_000, 20
#: Checkpoints of a training while it lasts: what an interruption may cost is what lies between two.
_CHECKPOINTS = 4
#: Files in the folder of a training: the losses of its checkpoint, of the start of stage 1, of parts after stage 2.
_LOSSES, _EXCHANGED, _PARTS = "losses.json", "exchanged.json", "parts.json"


class Comparison:
    """The trainings of a plan in a folder, and what is made and measured beside them; seed after seed."""

    def __init__(self, plan: Conversion, out: Path, jobs: int) -> None:
        self.plan, self.data, self.runs, self.jobs = plan, out / "data-bin", out / "runs", jobs
        self._ran: list[Ran] = []
        self._failed: dict[str, str] = {}
        self._missing, self._interrupted = 0, False

    def run(self) -> tuple[list[Ran], Compared]:
        """Train and measure what is not yet; the teachers, and what was made of them, a form and a seed each."""
        for seed in range(1, self.plan.seeds + 1):
            if self._train(TEACHER, [TEACHER], seed):
                transferred = self._train(TRANSFERRED, self.plan.models, seed)
                self._train(DISTILLED, transferred, seed)
                self._train(SCRATCH, self.plan.models, seed)
        teachers = [one for one in self._ran if one.stage == TEACHER]
        outcomes = [found for name in self.plan.models for one in teachers for found in self._outcomes(name, one)]
        return teachers, Compared(outcomes, self._failed, self._missing, self._interrupted)

    def _train(self, stage: str, names: Sequence[str], seed: int) -> list[str]:
        """Train, or after an interruption only read; the names that are complete."""
        if stage == TRANSFERRED and not self._interrupted:
            for name in names:
                self._exchange(name, seed)
        planned = [self.plan.planned(stage, name, seed, self.data, self.runs) for name in names]
        read = functools.partial(self._read, stage)
        if self._interrupted:
            ran = read_complete(planned, self.runs, read)
            compared = Compared(ran, {}, len(planned) - len(ran), True)
        else:
            compared = train_and_read(planned, self.runs, self.jobs, read)
        self._ran += compared.outcomes
        self._failed |= compared.failed
        self._missing += compared.missing
        self._interrupted = compared.interrupted
        return [one.model for one in compared.outcomes]

    def _read(self, stage: str, name: str, seed: int, folder: Path, trained: Trained) -> Ran:
        found = measured(folder / _LOSSES, lambda: losses(folder / LAST, self.data), dict[str, float])
        return Ran(name, seed, stage, folder, found, read_parameters(folder), trained.seconds, trained.command)

    def _exchange(self, name: str, seed: int) -> None:
        """Write the teacher with the attention of a form, unless it is there."""
        path = start_path(self.runs, name, seed)
        if not path.exists():
            teacher = self.runs / folder_name(TEACHER, TEACHER, seed) / LAST
            converted, _ = convert(teacher, "hybrid_lm", self.plan.overrides(name))
            with own_file(path) as part:
                tensor_files.save(converted, part)

    def _outcomes(self, name: str, teacher: Ran) -> list[Outcome]:
        """The outcome of converting a teacher to a form, in a list; an empty one if no stage of it is trained."""
        ours = {one.stage: one for one in self._ran if (one.model, one.seed) == (name, teacher.seed)}
        return [self._outcome(name, teacher, ours)] if ours else []

    def _outcome(self, name: str, teacher: Ran, ours: dict[str, Ran]) -> Outcome:
        found = {stage: one.losses for stage, one in ours.items()}
        learned, parts = 0, {}
        if (first := ours.get(TRANSFERRED)) is not None:
            start = start_path(self.runs, name, teacher.seed)
            found[EXCHANGED] = measured(first.folder / _EXCHANGED, lambda: losses(start, self.data), dict[str, float])
            learned = changed_parameters(start, first.folder / LAST)
        if (second := ours.get(DISTILLED)) is not None and self.plan.form(name).windowed:
            parts = measured(
                second.folder / _PARTS,
                lambda: losses_of_parts(second.folder / LAST, self.data),
                dict[str, dict[str, float]],
            )
        return Outcome(
            name,
            teacher.seed,
            next(iter(ours.values())).parameters,
            learned,
            teacher.losses,
            found,
            parts,
            {stage: one.seconds for stage, one in ours.items()},
            {stage: one.command for stage, one in ours.items()},
        )


def parser() -> CommandParser:
    """The script's options."""
    known = parser_of_trainings(COMMAND, __doc__.splitlines()[0], takes_file=False, updates=UPDATES)
    known.set_defaults(out=Path("work/from_softmax/compare"), layers=4)
    known.add_argument("--file", type=Path, required=True, help=FILE_HELP)
    add_forms(known)
    add_stages(known)
    known.add_argument(
        "--window-dropout",
        type=float,
        default=0.5,
        help="how often in stage 1 the linear part of a form with a window learns by itself (%(default)s)",
    )
    return known


@script("compare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    plan = Conversion.chosen(
        options,
        updates=options.updates or (QUICK_UPDATES if options.quick else UPDATES),
        evaluations=_CHECKPOINTS,
        more=shlex.split(options.more),
    )
    plan.check()
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        return _compare(options, plan, out, command_line(COMMAND, arguments))


def _compare(options: argparse.Namespace, plan: Conversion, out: Path, command: str) -> int:
    started = time.monotonic()
    keep_settings(out / "settings.json", plan.settings())
    tokens, unit = prepare_chosen(options, out)
    teachers, compared = Comparison(plan, out, options.jobs).run()
    content = {"plan": plan.as_dict(), "tokens": tokens, "unit": unit}
    show(out, report(plan.models, shown(plan, tokens, unit), content, teachers, compared), command, started)
    return compared.status


def shown(plan: Conversion, tokens: dict[str, int], unit: str) -> Shown:
    """How the comparison is shown. ``unit`` is what a token is."""
    splits = ", ".join(f"{count:,} {split}" for split, count in tokens.items())
    teacher_notes = [
        f"transformer_lm, pre-norm, {plan.layers} layers of width {plan.width}, {plan.heads} heads, sinusoids as "
        f"positions; updates of {plan.batch_tokens:,} {unit} in sequences of {plan.tokens_per_sample:,}, highest "
        f"learning rate {plan.lr:g}; tokens: {splits}",
        "perplexity of the last checkpoint in sequences of that length, mean ± standard deviation over seeds",
        *([f"further arguments of fairseq-train: {' '.join(plan.more)}"] if plan.more else []),
    ]
    first, second, both = map(plan.updates_of, (TRANSFERRED, DISTILLED, SCRATCH))
    notes = [
        f"perplexity of the test text ({unit}), mean ± standard deviation over seeds, each with a teacher of its own",
        "exchanged: the teacher's weights under another attention, before any update; stage 1: attention transfer, "
        f"{first:,} updates, learning rate {plan.transfer_lr:g}; stage 2: distillation, {second:,} updates, learning "
        f"rate {plan.distillation_lr:g}, temperature {plan.temperature:g}, weight {plan.weight:g}; from scratch: "
        f"{both:,} updates, learning rate {plan.lr:g}",
        "won back: (exchanged - converted) / (exchanged - teacher) in log perplexity; from scratch, %: the same of the "
        "model that is trained from scratch",
        "stage 1 teaches maps where each linear layer has some, else the projections of its attention",
        f"lolcats: a softmax window of {plan.window} tokens, which weighs {plan.window_weight:g} at first, and "
        f"--transfer-window-dropout {plan.window_dropout:g} in stage 1; lolcats_relu is lolcats with relu maps",
        "seconds of fairseq-train, both stages, the teacher's forward passes included: on one thread of this machine, "
        "with whatever else it did",
    ]
    numbers = {"valid": "perplexity, valid text", TEST: "perplexity, test text"}
    return Shown(
        "From softmax to linear time",
        plan.form,
        numbers,
        numbers[TEST],
        math.exp,
        2,
        True,
        f"{plan.updates:,} updates",
        teacher_notes,
        notes,
    )


if __name__ == "__main__":
    sys.exit(main())
