"""The results of a comparison as tables, JSON and a picture."""

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from ..shared.comparison import PARAMETERS, SEEDS, Column, Compared, Report, by_length, of_model, table
from ..shared.plots import STYLE, legend_beside, logarithmic, look, save
from ..shared.tables import MISSING, Table, spread
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
    compared: Compared  # its outcomes are scores
    speeds: list[Speed]
    speed_batch: int  # sequences of a step


TITLE = Column("model", known=lambda name: MODELS[name].title)


def tables(results: Results) -> list[Table]:
    """Accuracy, speeds of training and inference, and memory."""
    return [_accuracies(results), *(_speeds(results, kind) for kind in (TRAINING, INFERENCE)), _memory(results)]


def _accuracies(results: Results) -> Table:
    plan, task = results.plan, TASKS[results.plan.task]

    def paper(name: str) -> str:
        accuracy = published.accuracy(name, plan.task)
        return MISSING if accuracy is None else f"{accuracy:.2f}"

    columns = [
        TITLE,
        Column("architecture", known=lambda name: f"{MODELS[name].architecture}_lra_{plan.task}"),
        PARAMETERS,
        Column("selected on valid", lambda scores: spread([one.test for one in scores], 1)),
        Column("best on test", lambda scores: spread([one.best_test for one in scores], 1)),
        SEEDS,
        Column("seconds", lambda scores: f"{statistics.mean(one.seconds for one in scores):.0f}"),
        Column("published", known=paper),
    ]
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
    ]
    return table(f"{task.title}, accuracy", columns, plan.models, results.compared, notes)


def _speeds(results: Results, kind: str) -> Table:
    def cell(one: Speed) -> str:
        return f"{one.steps_per_second:.2f}" + ("" if one.faster is None else f" ({one.faster:.2f}x)")

    notes = [
        f"a step: {results.speed_batch} sequences without padding, on one thread; {_STEP[kind]}",
        "median of interleaved rounds; in parentheses how many steps are made in the time of one of softmax, the median"
        " over the rounds",
    ]
    return _lengths_table(f"Steps per second, {kind}", results, kind, cell, notes)


_STEP = {TRAINING: "loss and gradients, no optimizer", INFERENCE: "no gradients"}


def _memory(results: Results) -> Table:
    notes = ["allocated by torch in one training step, beyond weights and gradients"]
    title = "Memory of a training step, MiB"
    return _lengths_table(title, results, TRAINING, lambda one: f"{one.peak_bytes / 2**20:,.0f}", notes)


def _lengths(results: Results) -> list[int]:
    return sorted({one.length for one in results.speeds})


def _lengths_table(title: str, results: Results, kind: str, cell: Callable[[Speed], str], notes: list[str]) -> Table:
    columns = [TITLE, *by_length(_lengths(results), cell)]
    speeds = [one for one in results.speeds if one.kind == kind]
    return table(title, columns, results.plan.models, Compared(speeds, {}), notes)


def report(results: Results) -> Report:
    """All tables, and a picture."""
    content = {
        "plan": results.plan.as_dict(),
        "examples": results.examples,
        "majority": results.majority,
        "scores": [one._asdict() for one in results.compared.outcomes],
        "failed": results.compared.failed,
        "speeds": [one._asdict() for one in results.speeds],
        "speed_batch": results.speed_batch,
    }
    return Report(tables(results), content, functools.partial(draw, results))


def draw(results: Results, path: Path) -> None:
    """Accuracies of all seeds against those of guessing, and speed of training against length."""
    with plt.rc_context(STYLE):
        size = (13, max(4.2, 0.28 * len(results.plan.models)))
        figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
        _draw_accuracies(left, results)
        _draw_speeds(right, results)
        save(figure, path, dpi=130)


def _draw_accuracies(axes: Axes, results: Results) -> None:
    names = results.plan.models
    for place, name in enumerate(names):
        values = [one.test for one in of_model(results.compared.outcomes, name)]
        if values:
            axes.plot(values, [place] * len(values), look(place).marker, color=look(place).colour, alpha=0.6)
            axes.plot(statistics.mean(values), place, "|", color="black", markersize=16)
    axes.axvline(results.majority, color="gray", linestyle="--")
    axes.annotate(" always the most frequent class", (results.majority, -0.55), fontsize=8, color="gray", ha="left")
    axes.set_yticks(range(len(names)), [MODELS[name].title for name in names])
    axes.set(xlabel="accuracy on the test split, %", ylim=(len(names) - 0.5, -0.8))
    axes.set_title(f"{TASKS[results.plan.task].title}, a dot for each seed, a line for the mean")


def _draw_speeds(axes: Axes, results: Results) -> None:
    for place, name in enumerate(results.plan.models):
        speeds = [one for one in results.speeds if one.model == name and one.kind == TRAINING]
        points = sorted((one.length, one.steps_per_second) for one in speeds)
        if points:
            axes.plot(*zip(*points), marker=look(place).marker, label=MODELS[name].title, **look(place).line)
    axes.set(xlabel="tokens in a sequence", ylabel="training steps per second")
    logarithmic(axes, _lengths(results))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    if results.speeds:
        legend_beside(axes)
