"""Train classifiers of time series with several attentions and seeds, and print their accuracy next to the paper's.

``python -m recipes.time_series.compare --dataset JapaneseVowels --seeds 5`` from the checkout's root, through
fairseq-train, with the authors' training; ``recipes.time_series.classify`` fits methods that are not networks. After
an interruption the same command continues.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.figure import SubFigure

from common.files.output_files import new_folder
from fairseq_plugin.data.series_folder import write_folder

from ..shared.architectures import known_names
from ..shared.commands import shown_path
from ..shared.comparison import NO_READER, SEEDS, Column, PlannedTraining, by_model, planned_trainings
from ..shared.experiment import MILLIONS, MINUTES, Data, Experiment, Options, Record, mean, option
from ..shared.json_files import read_json
from ..shared.plots import STYLE, Style, legend_beside, save, style_of
from ..shared.scaled_windows import scaled_window_arguments
from ..shared.scripts import positive_int
from ..shared.settings import check_settings, keep_settings
from ..shared.tables import MISSING, Run, counted
from ..shared.trainings import Training, read_points
from . import prepare
from .archives import digest, read_archive
from .classify import CLASSIFIERS, RANDOM
from .published import MODELS, TABLE, published

SUFFIX = "_time_series"
#: Trained only on request: a second name of flowformer, and mechanisms that FLASH was compared with.
NOT_BY_DEFAULT = ("flow", "combiner", "quadratic")
EPOCHS = {"PEMS-SF": 400}
DEFAULT_EPOCHS = 100
#: The authors' script uses RAdam for all data sets but one.
OPTIMIZERS = {"SpokenArabicDigits": "adam"}
#: Epochs between two checkpoints, the most that an interruption loses; fewer if the last epoch would have none.
SAVE_INTERVAL = 10
#: What Python runs for a method that is not a network.
CLASSIFY = ("-m", "recipes.time_series.classify")
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 256
#: Fewer models share a panel of a picture; the panels of more stand so many in a row.
_FEW, _PANELS_BESIDE = 12, 6


#: Our name -> the paper's method, where it differs.
UNLIKE = {
    "hist_gradient_boosting": "XGBoost in place of scikit-learn's boosted trees (hist_gradient_boosting)",
    "tcn": "an encoder like that of tcn_time_series, trained without labels, and a support vector machine",
}
#: Method without attention -> the column of the paper's Table 6 to compare with.
BASELINES = {
    "dtw": "DTW",
    "rocket": "Rocket",
    "hist_gradient_boosting": "XGBoost",
    "lstm": "LSTM",
    "tcn": "Unsup.",
}


def default_names() -> list[str]:
    """The architectures that are trained by default, the paper's first."""
    return sorted(set(known_names(SUFFIX)) - set(NOT_BY_DEFAULT), key=lambda name: (name != "flowformer", name))


def models(text: str) -> list[str]:
    """The type of ``--models``: comma-separated names of methods, or of architectures with or without ``SUFFIX``.

    Raises:
        argparse.ArgumentTypeError: a name is unknown.
    """
    names, allowed = [name.removesuffix(SUFFIX) for name in text.split(",")], [*CLASSIFIERS, *known_names(SUFFIX)]
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(allowed)}")
    return names


@dataclass(frozen=True, kw_only=True)
class Series(Options):
    """The options of classifiers on one data set."""

    dataset: str = option("JapaneseVowels", "as for prepare (%(default)s)", metavar="NAME")
    file: Path | None = option(
        None, "a copy of the data set you have, as for prepare", setting=False, type=Path, metavar="ZIP_OR_TS"
    )
    seeds: int = option(5, "trainings of each model (%(default)s)", setting=False)
    models: Sequence[str] = option(
        tuple(default_names()),
        f"architectures without {SUFFIX}, and {', '.join(CLASSIFIERS)}; default: {','.join(default_names())}",
        setting=False,
        names=("--models", "--archs"),
        type=models,
        nargs="+",
        metavar="NAME",
    )
    epochs: int | None = option(None, f"default: the authors', {DEFAULT_EPOCHS}; 400 for PEMS-SF", type=positive_int)
    jobs: int = option(1, "trainings at a time, of one thread each", setting=False)
    quick: bool = False
    out: Path | None = option(None, "default: work/time_series/compare/NAME", setting=False, type=Path, metavar="DIR")
    add: Path | None = option(
        None,
        "results.json of another part, whose trainings are not made again",
        setting=False,
        type=Path,
        metavar="JSON",
    )

    def completed(self) -> "Series":
        """Fill in the epochs and the folder of the data set; see ``Options``."""
        epochs = self.epochs or EPOCHS.get(self.dataset, DEFAULT_EPOCHS)
        out = self.out or Path("work/time_series/compare") / self.dataset
        return dataclasses.replace(self, epochs=epochs, out=out)

    @property
    def validate_interval(self) -> int:
        """Epochs between two evaluations: 2, as in the authors' training, or 1 if the last epoch would have none."""
        return 1 if self.epochs % 2 else 2

    @property
    def evaluated(self) -> list[int]:
        """The epochs after which a training is evaluated."""
        return list(range(self.validate_interval, self.epochs + 1, self.validate_interval))


def train_arguments(options: Series, data: Data, name: str, seed: int) -> list[object]:
    """fairseq-train's arguments: the authors' optimiser, batch, clipping, epochs, and evaluation every two epochs."""
    longest = data.facts["longest"]
    return [
        data.folder,
        *"--user-dir fairseq_plugin --task time_series_classification --criterion sentence_prediction".split(),
        *("--arch", name + SUFFIX, *chunk_arguments(name, longest), *scaled_window_arguments(name, longest)),
        *("--optimizer", OPTIMIZERS.get(options.dataset, "radam"), "--lr", "0.001", "--lr-scheduler", "fixed"),
        *"--clip-norm 4.0 --batch-size 16 --required-batch-size-multiple 1".split(),
        *("--max-epoch", options.epochs, "--seed", seed),
        *("--valid-subset", "test", "--batch-size-valid", 128, "--validate-interval", options.validate_interval),
        *"--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric".split(),
        *("--save-interval", math.gcd(SAVE_INTERVAL, options.epochs), "--no-epoch-checkpoints"),
        *("--log-interval", 1_000_000, *NO_READER),
    ]


def chunk_arguments(name: str, longest: int) -> list[object]:
    """Chunk sizes for the mechanisms with chunks: about two chunks per series, of at most FLASH's 256 steps."""
    option = {"flash": "--flash-chunk-size", "mixed_chunk": "--mixed-chunk-chunk-size"}.get(name)
    if option is None:
        return []
    return [option, min(LARGEST_CHUNK, max(SMALLEST_CHUNK, 2 ** round(math.log2(longest / 2))))]


def plan(options: Series, data: Data) -> list[PlannedTraining]:
    """Every model with every seed; deterministic methods that are not networks are fitted once."""
    seeds = range(1, options.seeds + 1)
    fits = [
        PlannedTraining(
            name, seed, Training(f"{name}.{seed}", [data.folder, "--model", name, "--seed", seed], CLASSIFY)
        )
        for name in options.models
        if name in CLASSIFIERS
        for seed in (seeds if name in RANDOM else seeds[:1])
    ]
    networks = [name for name in options.models if name not in CLASSIFIERS]
    return fits + planned_trainings(networks, seeds, lambda name, seed: train_arguments(options, data, name, seed))


def read(options: Series, folder: Path, known: Record) -> Record:
    """The accuracies of a complete training in per cent, as fairseq rounds them; a single one for a fit.

    Raises:
        ValueError: its log lacks an evaluation.
    """
    points = [point for point in read_points(folder) if point.split == "test"]
    accuracies = [point.values["accuracy"] for point in points]
    if known["model"] in CLASSIFIERS and points:
        accuracies = accuracies[-1:]
    elif [point.epoch for point in points] != options.evaluated:
        epochs = ", ".join(str(point.epoch) for point in points)
        raise ValueError(
            f"{shown_path(folder)}/train.log has evaluations after epochs {epochs or 'none'}; "
            f"allowed: after every {options.validate_interval} of {options.epochs}"
        )
    return {"accuracies": accuracies, **ends(accuracies)}


def ends(accuracies: Sequence[float]) -> dict[str, float]:
    """The last accuracy, and the best, which is chosen on the test series, as by the authors' code."""
    return {"last": accuracies[-1], "best": max(accuracies)}


class Outcome(NamedTuple):
    """A record in results.json; reading it checks the types."""

    model: str  # without _time_series
    seed: int
    parameters: int  # 0 for a method that is not a network
    seconds: float
    peak_bytes: int | None  # None: not known
    command: str
    accuracies: list[float]  # on the test series at each evaluation
    last: float
    best: float


class Plan(NamedTuple):
    """The plan in results.json."""

    models: list[str]
    seeds: int
    dataset: str
    epochs: int


class Results(NamedTuple):
    """The content of results.json: the plan, the records, the runs that made them, and the digest of the data."""

    plan: Plan
    records: list[Record]
    runs: list[Run]
    series_sha256: str | None  # None in files of earlier versions


def read_results(path: Path) -> Results:
    """The content of ``path``, the results.json of a comparison.

    Raises:
        ValueError: it is not such a file.
    """
    allowed = "results.json of a comparison"
    content = read_json(path, allowed, plan=Plan, results=list[Outcome], run=Run, earlier=list[Run])
    records = [outcome._asdict() for outcome in content["results"]]
    runs = [*content["earlier"], content["run"]]
    return Results(content["plan"], records, runs, content.get("series_sha256"))


def make_data(options: Series) -> Data:
    """The data set, its digest, the length of its longest series, and the runs that made the records of ``--add``.

    Raises:
        ValueError: the folder or ``--add`` has trainings on other series; see also ``read_archive`` and ``added``.
    """
    part = None if options.add is None else added(options)
    splits = read_archive(options.dataset, options.out / "downloads", options.file)
    kept = {"--dataset": options.dataset, "series_sha256": digest(splits)}
    path = options.out / "data.json"
    check_settings(path, kept)
    if part is not None and part.series_sha256 not in (None, kept["series_sha256"]):
        raise ValueError(f"{options.add} is of other series than --dataset or --file; allowed: of the same")
    with new_folder(options.out / "data", prepare.COMMAND) as folder:
        described = write_folder(folder, splits)
    keep_settings(path, kept)
    runs = [run._asdict() for run in part.runs] if part else []
    facts = {"longest": described.longest, "earlier": runs, "series_sha256": kept["series_sha256"]}
    return Data(options.out / "data", facts)


def added(options: Series) -> Results:
    """The results of ``--add``.

    Raises:
        ValueError: it is not such a file, or has another data set or number of epochs.
    """
    results = read_results(options.add)
    if (results.plan.dataset, results.plan.epochs) != (options.dataset, options.epochs):
        raise ValueError(
            f"{options.add} is of {results.plan.dataset}, {results.plan.epochs} epochs; allowed: {options.dataset}, "
            f"{options.epochs} epochs"
        )
    return results


def earlier(options: Series, data: Data) -> list[Record]:
    """The records of ``--add`` for the chosen models and seeds."""
    records = [] if options.add is None else added(options).records
    return [record for record in records if record["model"] in options.models and record["seed"] <= options.seeds]


def shown_name(name: str) -> str:
    """The architecture or method that ``--models`` calls ``name``, as tables show it."""
    return name if name in CLASSIFIERS else f"{name}{SUFFIX}"


def in_paper(dataset: str, name: str) -> float | None:
    """The paper's accuracy of the model or method that is called ``name`` here; None if the paper has none."""
    if name in BASELINES and dataset in TABLE:
        return TABLE[dataset][MODELS.index(BASELINES[name])]
    return published(dataset, name)


def columns(options: Series, facts: Record) -> list[Column]:
    """Columns: accuracy after the last and of the best epoch, mean and deviation, and the paper's accuracy."""

    def paper(name: str) -> str:
        accuracy = in_paper(options.dataset, name)
        return MISSING if accuracy is None else f"{accuracy:.1f}"

    return [
        Column("architecture", known=shown_name),
        MILLIONS._replace(measured=lambda x: MILLIONS.measured(x) if x[0]["parameters"] else MISSING),
        Column("last epoch", mean("last")),
        Column("best epoch", mean("best")),
        Column("paper", known=paper),
        SEEDS,
        MINUTES,
    ]


def notes(options: Series, facts: Record) -> list[str]:
    """Notes below the table."""
    notes = [
        f"per cent of the test series, after {counted(options.epochs, 'epoch')} of training; mean and deviation over "
        "seeds",
        f"the best of {len(options.evaluated)} evaluations is chosen on the test series, as by the authors' code; the "
        "paper states no rule of selection and no number of runs",
    ]
    if options.dataset in TABLE:
        row = ", ".join(f"{model} {value}" for model, value in zip(MODELS, TABLE[options.dataset]))
        notes.append(f"the paper's row: {row}")
    if different := [name for name in UNLIKE if name in options.models]:
        notes.append("the paper has another method: " + "; ".join(UNLIKE[name] for name in different))
    runs = [Run(**run) for run in facts["earlier"]]
    return notes + [f"with trainings of `{run.command}`, {run.date}; {run.machine}; {run.versions}" for run in runs]


def draw(options: Series, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Draw the accuracies by epoch, and a dot for the last and the best epoch of each seed.

    A few models share a panel, which shows their means; of more models, each has a panel with a line for each seed.
    """
    models = by_model(records, options.models)
    with plt.rc_context(STYLE):
        if few := len(models) < _FEW:
            figure, (curves, dots) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
            _draw_means(curves, options, models)
        else:
            networks = {name: models[name] for name in models if name not in CLASSIFIERS}
            height = 1.7 * math.ceil(len(networks) / _PANELS_BESIDE)
            figure = plt.figure(figsize=(13, height + 4.6), layout="constrained")
            above, below = figure.subfigures(2, 1, height_ratios=(height, 4.6))
            curves, dots = _draw_panels(above, options, networks), below.subplots()
        curves.set_ylim(max(0.0, min(record["last"] for record in records) - 6.0), 100.5)
        for i, (name, model_records) in enumerate(models.items()):
            _draw_dots(dots, options, i, name, model_records, style_of(i))
        dots.set_xticks(range(len(models)), models, rotation=30 if few else 60, ha="right")
        dots.set_title("Each seed: last epoch (hollow), best epoch (filled)\nand the paper's (cross)")
        dots.grid(alpha=0.25)
        figure.suptitle(f"{options.dataset}: {counted(options.epochs, 'epoch')}")
        save(figure, path, dpi=130)


def _draw_means(axes: plt.Axes, options: Series, models: Mapping[str, Sequence[Record]]) -> None:
    """Draw the mean accuracy by epoch of all models."""
    for i, (name, records) in enumerate(models.items()):
        means = [statistics.mean(accuracies) for accuracies in zip(*(record["accuracies"] for record in records))]
        label = f"{name}, {counted(len(records), 'seed')}"
        if name in CLASSIFIERS:
            axes.axhline(means[0], label=label, linewidth=1.3, **style_of(i).line)
        else:
            axes.plot(options.evaluated, means, label=label, linewidth=1.3, **style_of(i).curve(len(means)))
    axes.set(xlabel="epoch", ylabel="accuracy on the test series, %", title="Mean over seeds")
    axes.grid(alpha=0.25)
    legend_beside(axes)


def _draw_panels(figure: SubFigure, options: Series, models: Mapping[str, Sequence[Record]]) -> plt.Axes:
    """Draw the accuracy by epoch of each seed, a panel for each model; returns one, whose axes are those of all."""
    rows = math.ceil(len(models) / _PANELS_BESIDE)
    panels = figure.subplots(rows, _PANELS_BESIDE, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, records) in zip(panels, models.items()):
        for i, record in enumerate(records):
            look = style_of(i).curve(len(record["accuracies"]))
            axes.plot(options.evaluated, record["accuracies"], linewidth=0.9, **look)
        axes.set_title(f"{name}, {counted(len(records), 'seed')}", fontsize="small")
        axes.grid(alpha=0.25)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    for axes in panels[: len(models)][-_PANELS_BESIDE:]:  # the last of each column
        axes.tick_params(labelbottom=True)
    figure.supxlabel("epoch", fontsize="medium")
    figure.supylabel("accuracy on the test series, %", fontsize="medium")
    return panels[0]


def _draw_dots(axes: plt.Axes, options: Series, place: int, name: str, records: Sequence[Record], style: Style) -> None:
    """Draw the accuracies of one model, side by side."""
    axes.plot(
        [place - 0.15] * len(records),
        [record["last"] for record in records],
        style.marker,
        mfc="none",
        color=style.colour,
    )
    axes.plot([place + 0.15] * len(records), [record["best"] for record in records], style.marker, color=style.colour)
    paper = in_paper(options.dataset, name)
    if paper is not None:
        axes.plot(place, paper, "x", color="black", ms=9, mew=2)


EXPERIMENT = Experiment(
    command="recipes.time_series.compare",
    about=__doc__.splitlines()[0],
    options=Series,
    title=lambda options, facts: f"Accuracy on {options.dataset}",
    columns=columns,
    notes=notes,
    prepare=make_data,
    earlier=earlier,
    plan=plan,
    read=read,
    picture=draw,
    picture_name="accuracy.png",
    whole={"data": prepare.COMMAND},
    runs="",
    one_budget=False,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
