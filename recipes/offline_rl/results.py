"""The results of a comparison on own data: tables, JSON, and a picture of returns against targets."""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from fairseq_plugin.data.episode_folder import EpisodeDescription

from ..shared.additions import addition_notes
from ..shared.comparison import MILLIONS, MINUTES, SEEDS, Column, Compared, Report, by_model, table
from ..shared.plots import STYLE, legend_beside, look, save
from ..shared.tables import Table, spread
from .acting import Played
from .d4rl import score


class Plan(NamedTuple):
    """Plan of a comparison: the models to train, and the target returns with which they act."""

    environment: str
    names: list[str]  # of architectures, without _decision, with additions
    seeds: list[int]
    context: str
    updates: int
    targets: list[float]
    episodes: int  # for each target


class Result(NamedTuple):
    """One complete training, and what its model did."""

    name: str
    seed: int
    parameters: int
    updates: list[int]  # at which the loss was logged
    losses: list[float]  # mean squared error of actions of -1 to 1, since the point before
    episodes: list[Played]
    milliseconds: float  # an action, of all episodes side by side
    seconds: float  # of training
    command: str

    def mean_at(self, target: float) -> float:
        """The mean return of the episodes with a target."""
        return statistics.mean(one.total for one in self.episodes if one.target == target)

    def follows(self, targets: Sequence[float]) -> float:
        """The correlation of the mean returns with their targets: 1 where they follow, 0 where they do not."""
        means = [self.mean_at(target) for target in targets]
        return statistics.correlation(targets, means) if len(set(means)) > 1 and len(targets) > 1 else 0.0


def tables(plan: Plan, described: EpisodeDescription, compared: Compared) -> list[Table]:
    """One table of models, and one of returns by target."""
    highest = plan.targets[-1]
    architecture = Column("architecture", known=_architecture)
    columns = [
        architecture,
        MILLIONS,
        Column("action MSE", lambda ours: spread([one.losses[-1] for one in ours], 4)),
        Column("return", lambda ours: spread([one.mean_at(highest) for one in ours], 0)),
        Column("score", lambda ours: spread([score(described, one.mean_at(highest)) for one in ours], 1)),
        Column("follows", lambda ours: spread([one.follows(plan.targets) for one in ours])),
        SEEDS,
        MINUTES,
    ]
    notes = [
        f"data: {described.name}, mean return {described.average:,.0f}, best {described.highest:,.0f}, least "
        f"{described.lowest:,.0f}. This is not D4RL",
        f"{plan.updates} updates, context {plan.context}; {plan.episodes} episodes for each target; mean and deviation "
        "over seeds",
        f"return and score: where {highest:,.0f} was asked for; score 0 is the data's least return, 100 its best",
        "follows: correlation of the returns with their targets, 1 where they follow",
    ]
    if further := [name for name in plan.names if name in ("bc", "awac")]:
        notes.append(f"{' and '.join(further)}: any target is the same to them, which have 10 times the updates")
    notes += addition_notes(plan.names)
    models = table(f"Returns on {plan.environment}", columns, plan.names, compared, notes)
    returns = [architecture, *(_return_at(target) for target in plan.targets)]
    trained = list(by_model(compared.outcomes, plan.names))
    return [models, table("Return by target", returns, trained, Compared(compared.outcomes, {}), [])]


def _architecture(name: str) -> str:
    """As linear_decision+forget."""
    plain, plus, additions = name.partition("+")
    return f"{plain}_decision{plus}{additions}"


def _return_at(target: float) -> Column:
    return Column(f"target {target:,.0f}", lambda ours: spread([one.mean_at(target) for one in ours], 0))


def report(plan: Plan, described: EpisodeDescription, compared: Compared) -> Report:
    """Both tables, and a picture."""
    results = compared.outcomes
    content = {"plan": plan._asdict(), "data": described.as_dict(), "failed": compared.failed}
    content["results"] = [
        {**one._asdict(), "episodes": [played._asdict() for played in one.episodes]} for one in results
    ]
    picture = functools.partial(draw, plan, described, results) if results else None
    return Report(tables(plan, described, compared), content, picture, "returns.png")


def draw(plan: Plan, described: EpisodeDescription, results: Sequence[Result], path: Path) -> None:
    """Draw returns against targets, mean and deviation over seeds, and the training curves."""
    with plt.rc_context(STYLE):
        figure, (returns, curves) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
        returns.plot(plan.targets, plan.targets, color="0.6", linewidth=1.0, label="return = target")
        returns.axhline(described.average, color="0.6", linestyle=":", linewidth=1.0, label="mean of the data")
        returns.axhline(described.highest, color="0.6", linestyle="--", linewidth=1.0, label="best of the data")
        for i, (name, ours) in enumerate(by_model(results, plan.names).items()):
            line = look(i).line
            means = [[one.mean_at(target) for one in ours] for target in plan.targets]
            deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in means]
            centres = [statistics.mean(values) for values in means]
            returns.errorbar(plan.targets, centres, deviations, marker=look(i).marker, capsize=3, label=name, **line)
            losses = [statistics.mean(at) for at in zip(*(one.losses for one in ours))]
            curves.plot(ours[0].updates[: len(losses)], losses, linewidth=1.3, **line)
        returns.set(xlabel="return asked for", ylabel="return reached", title="Mean and deviation over seeds")
        curves.set(xlabel="update", ylabel="action MSE", yscale="log", title="Training, mean over seeds")
        legend_beside(curves, handles=returns.get_legend_handles_labels()[0])
        for axes in (returns, curves):
            axes.grid(alpha=0.25)
        trained = f"context {plan.context}, {plan.updates} updates, trained {len(plan.seeds)} times"
        figure.suptitle(f"{plan.environment}, own data: {trained}")
        save(figure, path, dpi=110)
