"""The results of a comparison as tables, JSON and a picture."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from ..shared.plots import STYLE, legend_beside, look, save
from ..shared.tables import MISSING, Run, Table, spread, write_reports
from . import published
from .plan import MODELS, TASKS, Plan
from .speed import INFERENCE, TRAINING, Speed


class Score(NamedTuple):
    """One training: accuracies in per cent."""

    model: str
    seed: int
    parameters: int
    valid: float  # the best evaluation
    update: int  # of that evaluation
    test: float  # of the checkpoint that the valid split selected, read once
    best_test: float  # the best of all evaluations on the test split
    seconds: float
    peak_bytes: int  # of the fairseq-train process
    command: str


class Results(NamedTuple):
    """All of a comparison that is there."""

    plan: Plan
    examples: dict[str, int]  # by split
    majority: float  # accuracy on the test split of always naming its most frequent class, per cent
    scores: list[Score]
    failed: dict[str, str]  # by name of a training
    speeds: list[Speed]
    speed_batch: int  # sequences of a step


def tables(results: Results) -> list[Table]:
    """Accuracy, speeds of training and inference, and memory."""
    return [_accuracies(results), *(_speeds(results, kind) for kind in (TRAINING, INFERENCE)), _memory(results)]


def _accuracies(results: Results) -> Table:
    plan, task = results.plan, TASKS[results.plan.task]
    rows = []
    for name in plan.models:
        scores = [one for one in results.scores if one.model == name]
        paper = published.accuracy(name, plan.task)
        rows.append(
            (
                MODELS[name].title,
                f"{MODELS[name].architecture}_lra_{plan.task}",
                f"{scores[0].parameters:,}" if scores else MISSING,
                spread([one.test for one in scores], 1),
                spread([one.best_test for one in scores], 1),
                str(len(scores)),
                f"{statistics.mean(one.seconds for one in scores):.0f}" if scores else MISSING,
                MISSING if paper is None else f"{paper:.2f}",
            )
        )
    splits = ", ".join(f"{count:,} {split}" for split, count in results.examples.items())
    notes = [
        f"accuracy in per cent, mean ± standard deviation over the seeds; guessing gives {task.chance:.0f}, always the"
        f" most frequent class of the test split {results.majority:.1f}",
        "selected on valid: the checkpoint with the best accuracy on the valid split, whose test split is read once",
        "best on test: the best of all evaluations on the test split, as the released code reports it: no estimate"
        " of anything unseen",
        f"{plan.updates:,} updates of {plan.batch_size} sequences of at most {plan.length:,} tokens ({splits}), width"
        f" {plan.width}, {plan.layers} layers (FLASH twice as many units), learning rate {plan.lr:g} for all",
        "published: Table 2 of the Flowformer paper, for the Arena's lengths, sizes and budgets; another experiment",
        *(f"not trained: {name}: {reason}" for name, reason in results.failed.items()),
    ]
    header = (
        "model",
        "architecture",
        "parameters",
        "selected on valid",
        "best on test",
        "seeds",
        "seconds",
        "published",
    )
    return Table(f"{task.title}, accuracy", header, rows, notes)


def _speeds(results: Results, kind: str) -> Table:
    def cell(one: Speed) -> str:
        return f"{one.steps_per_second:.2f}" + ("" if one.faster is None else f" ({one.faster:.2f}x)")

    notes = [
        f"a step: {results.speed_batch} sequences without padding, on one thread; {_STEP[kind]}",
        "median of interleaved rounds; in parentheses how many steps are made in the time of one of softmax, the median"
        " over the rounds",
    ]
    return Table(f"Steps per second, {kind}", _header(results), _by_length(results, kind, cell), notes)


_STEP = {TRAINING: "loss and gradients, no optimizer", INFERENCE: "no gradients"}


def _memory(results: Results) -> Table:
    notes = ["allocated by torch in one training step, beyond weights and gradients"]
    rows = _by_length(results, TRAINING, lambda one: f"{one.peak_bytes / 2**20:,.0f}")
    return Table("Memory of a training step, MiB", _header(results), rows, notes)


def _lengths(results: Results) -> list[int]:
    return sorted({one.length for one in results.speeds})


def _header(results: Results) -> tuple[str, ...]:
    return "model", *(f"{length:,}" for length in _lengths(results))


def _by_length(results: Results, kind: str, cell: Callable[[Speed], str]) -> list[tuple[str, ...]]:
    found = {(one.model, one.length): cell(one) for one in results.speeds if one.kind == kind}
    return [
        (MODELS[name].title, *(found.get((name, length), MISSING) for length in _lengths(results)))
        for name in results.plan.models
    ]


def write(out: Path, results: Results, run: Run) -> str:
    """Write results.txt, .md, .json and .png to ``out``; returns the text."""
    blocks = tables(results)
    content = {
        "run": run._asdict(),
        "plan": results.plan._asdict(),
        "examples": results.examples,
        "majority": results.majority,
        "scores": [one._asdict() for one in results.scores],
        "failed": results.failed,
        "speeds": [one._asdict() for one in results.speeds],
        "speed_batch": results.speed_batch,
    }
    plain = write_reports(out, blocks, run, content)
    draw(results, out / "results.png")
    return plain


def draw(results: Results, path: Path) -> None:
    """Accuracies of all seeds against those of guessing, and speed of training against length."""
    with plt.rc_context(STYLE):
        names = results.plan.models
        size = (13, max(4.2, 0.28 * len(names)))
        figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
        looks = {name: look(i) for i, name in enumerate(names)}
        for place, name in enumerate(names):
            values = [one.test for one in results.scores if one.model == name]
            if values:
                left.plot(values, [place] * len(values), looks[name].marker, color=looks[name].colour, alpha=0.6)
                left.plot(statistics.mean(values), place, "|", color="black", markersize=16)
        left.axvline(results.majority, color="gray", linestyle="--")
        left.annotate(" always the most frequent class", (results.majority, -0.55), fontsize=8, color="gray", ha="left")
        left.set_yticks(range(len(names)), [MODELS[name].title for name in names])
        left.set(xlabel="accuracy on the test split, %", ylim=(len(names) - 0.5, -0.8))
        left.set_title(f"{TASKS[results.plan.task].title}, a dot for each seed, a line for the mean")
        for name in names:
            points = sorted(
                (one.length, one.steps_per_second)
                for one in results.speeds
                if one.model == name and one.kind == TRAINING
            )
            if points:
                right.plot(*zip(*points), marker=looks[name].marker, label=MODELS[name].title, **looks[name].line)
        right.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="training steps per second")
        right.set_xticks(_lengths(results))
        right.xaxis.set_minor_locator(NullLocator())
        for axis in (right.xaxis, right.yaxis):
            axis.set_major_formatter(ScalarFormatter())
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_minor_locator(NullLocator())
        right.grid(alpha=0.25)
        if results.speeds:
            legend_beside(right)
        save(figure, path, dpi=130)
