"""The results of a comparison: a table beside the published numbers, JSON, and a picture."""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from ..shared.comparison import MILLIONS, MINUTES, SEEDS, Column, Compared, Report, by_model, table
from ..shared.json_files import read_json
from ..shared.plots import STYLE, Look, legend_beside, look, save
from ..shared.tables import MISSING, Run, Table, spread
from .classify import CLASSIFIERS
from .published import MODELS, TABLE, published

#: Where the paper's method is not the same.
UNLIKE = {
    "hist_gradient_boosting": "XGBoost in place of scikit-learn's boosted trees (hist_gradient_boosting)",
    "tcn": "an encoder like that of tcn_time_series, trained without labels, and a support vector machine",
}
#: What has no attention here -> the column of the paper's Table 6 that stands beside it.
BASELINES = {
    "dtw": "DTW",
    "rocket": "Rocket",
    "hist_gradient_boosting": "XGBoost",
    "lstm": "LSTM",
    "tcn": "Unsup.",
}


class Plan(NamedTuple):
    """Plan of a comparison: the models to train, on which data set, with which seeds and how long."""

    dataset: str
    names: list[str]  # of architectures, without _time_series
    seeds: list[int]
    epochs: int

    @property
    def validate_interval(self) -> int:
        """Epochs between two evaluations: 2, as in the authors' training, or 1 where the last epoch would have none."""
        return 1 if self.epochs % 2 else 2

    @property
    def evaluated(self) -> list[int]:
        """The epochs after which a training is evaluated."""
        return list(range(self.validate_interval, self.epochs + 1, self.validate_interval))


class Result(NamedTuple):
    """One complete training."""

    name: str
    seed: int
    parameters: int  # 0 where it is no network
    accuracies: list[float]  # on the test series at each evaluation, per cent, as fairseq rounds them
    seconds: float
    command: str

    @property
    def last(self) -> float:
        """After the last epoch."""
        return self.accuracies[-1]

    @property
    def best(self) -> float:
        """The best of all evaluations: chosen on the test series, as the paper does."""
        return max(self.accuracies)


class Earlier(NamedTuple):
    """The trainings of an earlier part of a comparison, and the runs they are from."""

    results: list[Result]
    runs: list[Run]


def read(path: Path, plan: Plan) -> Earlier:
    """Read the trainings of an earlier part of the comparison from ``path``, its results.json.

    Raises:
        ValueError: ``path`` is no such file, or is of another data set or number of epochs.
    """
    of, earlier = read_outcomes(path)
    if (of.dataset, of.epochs) != (plan.dataset, plan.epochs):
        raise ValueError(
            f"{path} is of {of.dataset}, {of.epochs} epochs; allowed: {plan.dataset}, {plan.epochs} epochs"
        )
    return earlier


def read_outcomes(path: Path) -> tuple[Plan, Earlier]:
    """The plan and the outcomes in ``path``, the results.json of a comparison.

    Raises:
        ValueError: it is no such file.
    """
    found = read_json(path, "results.json of a comparison", plan=Plan, results=list[Result], runs=list[Run])
    return found["plan"], Earlier(found["results"], found["runs"])


def report(plan: Plan, compared: Compared, earlier: Sequence[Run] = ()) -> Report:
    """A table with a row for each model, and a picture; ``earlier`` runs made some of the outcomes."""
    results = compared.outcomes
    content = {"plan": plan._asdict(), "results": [one._asdict() for one in results], "failed": compared.failed}
    tables = [_table(plan, compared, earlier)]
    picture = functools.partial(draw, plan, results) if results else None
    return Report(tables, content, picture, "accuracy.png", earlier)


def shown_name(name: str) -> str:
    """The architecture or method that the plan calls ``name``, as tables show it."""
    return name if name in CLASSIFIERS else f"{name}_time_series"


def in_paper(dataset: str, name: str) -> float | None:
    """The accuracy in the paper of what is called ``name`` here, see ``BASELINES``; None if it has none."""
    if name in BASELINES and dataset in TABLE:
        return TABLE[dataset][MODELS.index(BASELINES[name])]
    return published(dataset, name)


def _table(plan: Plan, compared: Compared, earlier: Sequence[Run]) -> Table:
    """Accuracy after the last epoch and of the best one, mean and deviation, and the paper's."""

    def paper(name: str) -> str:
        accuracy = in_paper(plan.dataset, name)
        return MISSING if accuracy is None else f"{accuracy:.1f}"

    columns = [
        Column("architecture", known=shown_name),
        Column(MILLIONS.header, lambda ours: MILLIONS.measured(ours) if ours[0].parameters else MISSING),
        Column("last epoch", lambda ours: spread([one.last for one in ours])),
        Column("best epoch", lambda ours: spread([one.best for one in ours])),
        Column("paper", known=paper),
        SEEDS,
        MINUTES,
    ]
    notes = [
        f"per cent of the test series, after {plan.epochs} epochs of training; mean and deviation over seeds",
        f"the best of {len(plan.evaluated)} evaluations is chosen on the test series, as in the paper, whose numbers "
        "are of one run",
    ]
    if plan.dataset in TABLE:
        row = ", ".join(f"{model} {value}" for model, value in zip(MODELS, TABLE[plan.dataset]))
        notes.append(f"the paper's row: {row}")
    if unlike := [name for name in UNLIKE if name in plan.names]:
        notes.append("the paper has another method: " + "; ".join(UNLIKE[name] for name in unlike))
    notes += [f"with trainings of `{one.command}`, {one.date}; {one.machine}; {one.versions}" for one in earlier]
    return table(f"Accuracy on {plan.dataset}", columns, plan.names, compared, notes)


def draw(plan: Plan, results: Sequence[Result], path: Path) -> None:
    """Draw the mean accuracy by epoch, and a dot for the last and the best epoch of each seed."""
    models = by_model(results, plan.names)
    with plt.rc_context(STYLE):
        figure, (curves, dots) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
        for i, (name, ours) in enumerate(models.items()):
            means = [statistics.mean(at) for at in zip(*(one.accuracies for one in ours))]
            label = f"{name}, {len(ours)} seed{'s' if len(ours) > 1 else ''}"
            if name in CLASSIFIERS:
                curves.axhline(means[0], label=label, linewidth=1.3, **look(i).line)
            else:
                curves.plot(plan.evaluated, means, label=label, linewidth=1.3, **look(i).curve(len(means)))
            _draw_dots(dots, plan, i, name, ours, look(i))
        lowest = min(min(one.last, one.best) for one in results)
        curves.set(xlabel="epoch", ylabel="accuracy on the test series, %", ylim=(max(0.0, lowest - 6.0), 100.5))
        curves.set_title("Mean over seeds")
        legend_beside(curves)
        dots.set_xticks(range(len(models)), models, rotation=30, ha="right")
        dots.set_title("Each seed: last epoch (hollow), best epoch (filled)\nand the paper's (cross)")
        for axes in (curves, dots):
            axes.grid(alpha=0.25)
        figure.suptitle(f"{plan.dataset}: {plan.epochs} epochs")
        save(figure, path, dpi=130)


def _draw_dots(axes: plt.Axes, plan: Plan, place: int, name: str, ours: Sequence[Result], style: Look) -> None:
    """The accuracies of one model, side by side."""
    axes.plot([place - 0.15] * len(ours), [one.last for one in ours], style.marker, mfc="none", color=style.colour)
    axes.plot([place + 0.15] * len(ours), [one.best for one in ours], style.marker, color=style.colour)
    paper = in_paper(plan.dataset, name)
    if paper is not None:
        axes.plot(place, paper, "x", color="black", ms=9, mew=2)
