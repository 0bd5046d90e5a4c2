"""Train models with several attentions and seeds to act from own data, let them act, and print their returns.

``python -m recipes.offline_rl.compare --minutes 30`` from the checkout's root: data is collected, Decision Transformers
are trained through fairseq-train and evaluated, as are ``bc`` and ``awac``, which have no attention. After an
interruption the same command continues.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fairseq.models import ARCH_MODEL_REGISTRY
from matplotlib import pyplot as plt

from fairseq_plugin.data.episode_folder import EpisodeDescription, read_description
from fairseq_plugin.tasks.offline_rl import read_context

from ..shared.architectures import architectures_of, option_prefix, with_suffix
from ..shared.comparison import NO_READER, SEEDS, Column, Results, by_model, counted_seeds, table
from ..shared.experiment import MILLIONS, MINUTES, Data, Experiment, Options, Record, mean, option
from ..shared.json_files import read_json, write_json
from ..shared.plots import STYLE, legend_beside, save, style_of
from ..shared.scripts import positive_int
from ..shared.tables import Table, spread
from ..shared.trainings import read_points
from ..shared.variants import mechanism_of, variant_arguments, variant_notes
from .acting import Played, evaluate, load
from .collect import collect
from .d4rl import score
from .speed import seconds_per_update

SUFFIX = "_decision"
#: The type of ``--archs``.
architectures = architectures_of(SUFFIX, additions=True)
DEFAULT_NAMES = ("flowformer", "softmax", "linear")
#: Smaller than the paper's models, which would need a day on a CPU.
SIZES = "--decoder-layers 2 --decoder-embed-dim 64 --decoder-attention-heads 4".split()
#: Model without attention -> its updates relative to a Transformer's; one costs a fraction of the time.
FURTHER_UPDATES = {"bc": 10, "awac": 10}
#: Shares of the time for the search of a policy and for the trainings; acting gets the remaining time.
SEARCH_SHARE, TRAINING_SHARE = 0.1, 0.6
#: Seconds that fairseq needs before the first update.
_START = 12.0
#: Epochs of a training; an interruption loses at most one.
EPOCHS = 10
_TARGETS = 5
#: The file in the folder of a training with the episodes of its model.
RETURNS = "returns.json"


@dataclass(frozen=True, kw_only=True)
class Acting(Options):
    """The options of models that act in one environment."""

    env: str = option("HalfCheetah-v5", "of gymnasium (%(default)s)", metavar="NAME")
    minutes: float = option(30.0, "for everything, about (%(default)s)")
    models: Sequence[str] = option(
        DEFAULT_NAMES,
        f"architectures without {SUFFIX}: of any causal mechanism, also with additions, as in "
        f"linear+forget+short_conv, bc and awac ({','.join(DEFAULT_NAMES)})",
        setting=False,
        names=("--models", "--archs"),
        type=architectures,
        nargs="+",
        metavar="NAME",
    )
    seeds: int = option(3, "trainings of each model (%(default)s)", setting=False)
    context: str = option("10", "steps of a window (%(default)s)", metavar="K|full")
    updates: int | None = option(
        None, "of each training; default: as many as the time allows", setting=False, type=positive_int
    )
    episodes: int = option(5, "for each target (%(default)s)", setting=False)
    jobs: int = option(1, "trainings at a time, of one thread each", setting=False)
    quick: bool = False
    out: Path | None = option(None, "default: work/offline_rl/compare/ENV", setting=False, type=Path, metavar="DIR")

    def completed(self) -> "Acting":
        """Fill in the folder of the environment; see ``Options``."""
        read_context("--context", self.context)
        return dataclasses.replace(self, out=self.out or Path("work/offline_rl/compare") / self.env)

    def settings(self) -> Record:
        """Name of an option -> its value, for settings that all trainings in a folder share."""
        return {f"--{name}": value for name, value in super().settings().items()}

    def as_dict(self) -> Record:
        """The options that are stored with the results."""
        return {name: getattr(self, name) for name in ("models", "seeds", "env", "minutes", "context", "episodes")}


def train_arguments(data: Path, name: str, context: str, updates: int, seed: int) -> list[object]:
    """fairseq-train's arguments: the authors' optimiser, with a shorter warmup; whole episodes in smaller batches.

    Models without attention have their own sizes; AWAC has its own rate and no clipping.
    """
    batch = 4 if read_context("--context", context) is None else 64
    updates *= FURTHER_UPDATES.get(name, 1)
    architecture = mechanism_of(name) + SUFFIX
    criterion = ARCH_MODEL_REGISTRY[architecture].criterion
    rate, clip = ("0.0003", "0") if name == "awac" else ("0.001", "0.25")
    return [
        data,
        *("--user-dir", "fairseq_plugin", "--task", "offline_rl", "--criterion", criterion, "--disable-validation"),
        *("--arch", architecture, *variant_arguments(name, option_prefix(architecture)), "--context", context),
        *([] if name in FURTHER_UPDATES else SIZES),
        *("--batch-size", batch, "--windows-per-epoch", batch * max(1, updates // EPOCHS)),
        *("--optimizer", "adam", "--weight-decay", "0.0001", "--lr", rate, "--clip-norm", clip),
        *("--lr-scheduler", "fixed"),
        *("--warmup-updates", max(1, updates // EPOCHS), "--max-update", updates, "--seed", seed),
        *("--no-epoch-checkpoints", "--log-interval", max(1, updates // 50)),
        *NO_READER,
    ]


def plan_updates(options: Acting, data: Path) -> int:
    """The number of updates of a training that fills its share of the time; measured once, and stored in ``--out``."""
    path = options.out / "updates.json"
    if options.updates is not None:
        return options.updates
    if not path.exists():
        commands = {name: train_arguments(data, name, options.context, EPOCHS, 1) for name in options.models}
        seconds = [FURTHER_UPDATES.get(name, 1) * seconds_per_update(commands[name]) for name in commands]
        budget = TRAINING_SHARE * 60.0 * options.minutes * options.jobs / options.seeds - _START * len(seconds)
        updates = max(EPOCHS, int(budget / sum(seconds)))
        write_json(path, {"updates": updates})
    return read_json(path, updates=int)["updates"]


def prepare(options: Acting) -> Data:
    """The data, collected unless it exists; the facts are its description, the updates and the targets."""
    data = options.out / "behaviour" / "data"
    if data.exists():
        described = read_description(data)
    else:
        described = collect(options.env, SEARCH_SHARE * options.minutes, data.parent)
    targets = [round(x, 1) for x in np.linspace(described.lowest, described.highest, _TARGETS).tolist()]
    facts = {"data": described.as_dict(), "updates": plan_updates(options, data), "targets": targets}
    return Data(data, facts)


def act(options: Acting, data: Data, folder: Path) -> None:
    """Let the model trained in ``folder`` act, and store its episodes there, unless they exist."""
    path, targets = folder / RETURNS, data.facts["targets"]
    settings = {"environment": options.env, "targets": targets, "episodes": options.episodes}
    if path.exists() and read_json(path, settings=dict)["settings"] == settings:
        return
    evaluation = evaluate(load(folder / "checkpoints" / "checkpoint_last.pt"), options.env, targets, options.episodes)
    content = {"settings": settings, "milliseconds": evaluation.milliseconds}
    write_json(path, content | {"played": [played._asdict() for played in evaluation.episodes]})
    print(f"  {folder.name}: {evaluation.milliseconds:.1f} ms an action", flush=True)


def read(options: Acting, folder: Path, known: Record) -> Record | None:
    """The losses and episodes of a complete training; None if its model has not acted."""
    if not (folder / RETURNS).exists():
        return None
    stored = read_json(folder / RETURNS, settings=dict, played=list[Played], milliseconds=float)
    if stored["settings"]["episodes"] != options.episodes:
        return None
    points = [point for point in read_points(folder) if point.split == "train_inner"]
    losses = [point.values.get("action_mse", point.values["loss"]) for point in points]
    return {
        "updates": [point.update for point in points],  # at which the loss was logged
        "losses": losses,  # mean squared error of actions in -1 to 1, since the previous point
        "action_mse": losses[-1],
        "episodes": [played._asdict() for played in stored["played"]],
        "milliseconds": stored["milliseconds"],  # per action of all parallel episodes
    }


def mean_at(record: Record, target: float) -> float:
    """The mean return of the episodes with this target."""
    return statistics.mean(played["total"] for played in record["episodes"] if played["target"] == target)


def follows(record: Record, targets: Sequence[float]) -> float:
    """The correlation of the mean returns with their targets: 1 if returns follow targets, 0 if they do not."""
    means = [mean_at(record, target) for target in targets]
    return statistics.correlation(targets, means) if len(set(means)) > 1 and len(targets) > 1 else 0.0


ARCHITECTURE = Column("architecture", known=lambda name: with_suffix(name, SUFFIX))


def _return_at(target: float, header: str) -> Column:
    return Column(header, lambda records: spread([mean_at(record, target) for record in records], 0))


def columns(options: Acting, facts: Record) -> list[Column]:
    """Columns of the table of models."""
    described, targets = EpisodeDescription(**facts["data"]), facts["targets"]

    def scores(records: Sequence[Record]) -> str:
        return spread([score(described, mean_at(record, targets[-1])) for record in records], 1)

    return [
        ARCHITECTURE,
        MILLIONS,
        Column("action MSE", mean("action_mse", 4)),
        _return_at(targets[-1], "return"),
        Column("score", scores),
        Column("follows", lambda records: spread([follows(record, targets) for record in records])),
        SEEDS,
        MINUTES,
    ]


def notes(options: Acting, facts: Record) -> list[str]:
    """Notes below the table."""
    described = EpisodeDescription(**facts["data"])
    notes = [
        f"data: {described.name}, mean return {described.average:,.0f}, best {described.highest:,.0f}, least "
        f"{described.lowest:,.0f}. This is not D4RL",
        f"{facts['updates']} updates, context {options.context}; {options.episodes} episodes for each target; mean and "
        "deviation over seeds",
        f"return and score: where {facts['targets'][-1]:,.0f} was asked for; score 0 is the data's least return, 100 "
        "its best",
        "follows: correlation of the returns with their targets, 1 where they follow",
    ]
    if names := [name for name in options.models if name in FURTHER_UPDATES]:
        notes.append(f"{' and '.join(names)}: any target is the same to them, which have 10 times the updates")
    return notes + variant_notes(options.models)


def extra_tables(options: Acting, facts: Record, records: list[Record]) -> list[Table]:
    """Returns by target."""
    returns = [ARCHITECTURE, *(_return_at(target, f"target {target:,.0f}") for target in facts["targets"])]
    return [table("Return by target", returns, list(by_model(records, options.models)), Results(records, {}), [])]


def draw(options: Acting, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Draw returns against targets, mean and deviation over seeds, and the training curves."""
    described, targets = EpisodeDescription(**facts["data"]), facts["targets"]
    with plt.rc_context(STYLE):
        figure, (returns, curves) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
        returns.plot(targets, targets, color="0.6", linewidth=1.0, label="return = target")
        returns.axhline(described.average, color="0.6", linestyle=":", linewidth=1.0, label="mean of the data")
        returns.axhline(described.highest, color="0.6", linestyle="--", linewidth=1.0, label="best of the data")
        for i, (name, model_records) in enumerate(by_model(records, options.models).items()):
            line = style_of(i).line
            means = [[mean_at(record, target) for record in model_records] for target in targets]
            deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in means]
            centres = [statistics.mean(values) for values in means]
            returns.errorbar(targets, centres, deviations, marker=style_of(i).marker, capsize=3, label=name, **line)
            losses = [
                statistics.mean(seed_losses) for seed_losses in zip(*(record["losses"] for record in model_records))
            ]
            curves.plot(model_records[0]["updates"][: len(losses)], losses, linewidth=1.3, **line)
        returns.set(xlabel="return asked for", ylabel="return reached", title="Mean and deviation over seeds")
        curves.set(xlabel="update", ylabel="action MSE", yscale="log", title="Training, mean over seeds")
        legend_beside(curves, handles=returns.get_legend_handles_labels()[0])
        for axes in (returns, curves):
            axes.grid(alpha=0.25)
        seeds = counted_seeds(by_model(records, options.models))
        trained = f"context {options.context}, {facts['updates']} updates, {seeds}"
        figure.suptitle(f"{options.env}, own data: {trained}")
        save(figure, path, dpi=110)


EXPERIMENT = Experiment(
    command="recipes.offline_rl.compare",
    about=__doc__.splitlines()[0],
    options=Acting,
    title=lambda options, facts: f"Returns on {options.env}",
    columns=columns,
    notes=notes,
    prepare=prepare,
    arguments=lambda options, data, name, seed: train_arguments(
        data.folder, name, options.context, data.facts["updates"], seed
    ),
    read=read,
    evaluate=act,
    extra_tables=extra_tables,
    picture=draw,
    picture_name="returns.png",
    runs="",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
