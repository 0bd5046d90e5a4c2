"""The results of a comparison on own data: tables, JSON, and a picture of returns against targets."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from fairseq_plugin.data.episode_folder import EpisodeDescription

from ..shared.plots import STYLE, look, save
from ..shared.tables import MISSING, Run, Table, write_reports
from .acting import Played
from .d4rl import score
from .evaluate import spread


class Plan(NamedTuple):
    """What is trained and how it acts."""

    environment: str
    names: list[str]  # of architectures, without _decision
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


def tables(plan: Plan, described: EpisodeDescription, results: Sequence[Result], failed: dict[str, str]) -> list[Table]:
    """One table of models, and one of returns by target."""
    models, returns = [], []
    for name in plan.names:
        ours = [one for one in results if one.name == name]
        shown = (f"{name}_decision", *([MISSING] * 7))
        if ours:
            highest = [one.mean_at(plan.targets[-1]) for one in ours]
            shown = (
                f"{name}_decision",
                f"{ours[0].parameters / 1e6:.2f} M",
                spread([one.losses[-1] for one in ours], 4),
                spread(highest),
                spread([score(described, total) for total in highest], 1),
                spread([one.follows(plan.targets) for one in ours], 2),
                str(len(ours)),
                f"{statistics.median(one.seconds for one in ours) / 60:.1f}",
            )
            by_target = [spread([one.mean_at(target) for one in ours]) for target in plan.targets]
            returns.append((f"{name}_decision", *by_target))
        models.append(shown)
    header = ("architecture", "parameters", "action MSE", "return", "score", "follows", "seeds", "minutes each")
    notes = [
        f"data: {described.name}, mean return {described.average:,.0f}, best {described.highest:,.0f}, least "
        f"{described.lowest:,.0f}. This is not D4RL",
        f"{plan.updates} updates, context {plan.context}; {plan.episodes} episodes for each target; mean and deviation "
        "over seeds",
        f"return and score: where {plan.targets[-1]:,.0f} was asked for; score 0 is the data's least return, 100 its "
        "best",
        "follows: correlation of the returns with their targets, 1 where they follow",
        *(f"not trained: {name}: {reason}" for name, reason in failed.items()),
    ]
    targets = tuple(f"target {target:,.0f}" for target in plan.targets)
    return [
        Table(f"Decision Transformers on {plan.environment}", header, models, notes),
        Table("Return by target", ("architecture", *targets), returns, []),
    ]


def write(
    out: Path,
    plan: Plan,
    described: EpisodeDescription,
    results: Sequence[Result],
    failed: dict[str, str],
    run: Run,
) -> str:
    """Write results.txt, .md and .json and returns.png to ``out``; returns the text."""
    out.mkdir(parents=True, exist_ok=True)
    blocks = tables(plan, described, results, failed)
    content = {"run": run._asdict(), "plan": plan._asdict(), "data": described.as_dict(), "failed": failed}
    content["results"] = [
        {**one._asdict(), "episodes": [played._asdict() for played in one.episodes]} for one in results
    ]
    plain = write_reports(out, blocks, run, content)
    if results:
        draw(plan, described, results, out / "returns.png")
    return plain


def draw(plan: Plan, described: EpisodeDescription, results: Sequence[Result], path: Path) -> None:
    """Draw returns against targets, mean and deviation over seeds, and the training curves."""
    names = [name for name in plan.names if any(one.name == name for one in results)]
    with plt.rc_context(STYLE):
        figure, (returns, curves) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
        returns.plot(plan.targets, plan.targets, color="0.6", linewidth=1.0, label="return = target")
        returns.axhline(described.average, color="0.6", linestyle=":", linewidth=1.0, label="mean of the data")
        returns.axhline(described.highest, color="0.6", linestyle="--", linewidth=1.0, label="best of the data")
        for i, name in enumerate(names):
            ours = [one for one in results if one.name == name]
            line = look(i).line
            means = [[one.mean_at(target) for one in ours] for target in plan.targets]
            deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in means]
            centres = [statistics.mean(values) for values in means]
            returns.errorbar(plan.targets, centres, deviations, marker=look(i).marker, capsize=3, label=name, **line)
            losses = [statistics.mean(at) for at in zip(*(one.losses for one in ours))]
            curves.plot(ours[0].updates[: len(losses)], losses, label=name, linewidth=1.3, **line)
        returns.set(xlabel="return asked for", ylabel="return reached", title="Mean and deviation over seeds")
        curves.set(xlabel="update", ylabel="action MSE", yscale="log", title="Training, mean over seeds")
        for axes in (returns, curves):
            axes.legend(frameon=False, fontsize=8)
            axes.grid(alpha=0.25)
        trained = f"context {plan.context}, {plan.updates} updates, trained {len(plan.seeds)} times"
        figure.suptitle(f"{plan.environment}, own data: {trained}")
        save(figure, path, dpi=110)
