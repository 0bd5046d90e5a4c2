"""Train every attention on a task of the Long Range Arena with one budget, and print accuracy, speed and memory.

``python -m recipes.lra.compare --task listops --length 256 --seeds 3`` from the checkout's root, through fairseq-train
and fairseq-validate. After an interruption the same command continues.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ..shared import fairseq_log
from ..shared.commands import python_command, run
from ..shared.comparison import SEEDS, Column, Results, by_length, of_model, table
from ..shared.download import file_sha256
from ..shared.experiment import PARAMETERS, Data, Experiment, Record, largest, mean
from ..shared.json_files import read_json, write_json
from ..shared.plots import STYLE, lines_by_length, save, seeds_in_rows
from ..shared.settings import keep_settings
from ..shared.tables import MISSING, Table
from ..shared.trainings import read_points
from . import listops, published
from .examples import SPLITS, read_labels
from .listops_blocks import Plan as ListopsPlan
from .plan import MODELS, TASKS, Arena
from .speed import INFERENCE, TRAINING, Speed

#: The file in the folder of a training with the results of its selected checkpoint on the test split.
TEST = "test.json"
#: Expressions of a generated ListOps, and the shortest ones as a share of the longest.
SIZES = {"train": 64_000, "valid": 1_000, "test": 1_000}
QUICK_SIZES = {"train": 200, "valid": 40, "test": 40}
_SHORTEST = 16
TITLE = Column("model", known=lambda name: MODELS[name].title)


def prepare(options: Arena) -> Data:
    """The folder of ``--data``, or generated ListOps of the length; the facts are the size of each split and chance.

    Raises:
        ValueError: ``--out`` has trainings on other examples.
    """
    data = options.data
    if data is None:
        data = options.out / "data"
        # --max-length is exclusive, which leaves room for the first token.
        lengths = {"min_length": options.length // _SHORTEST, "max_length": options.length}
        sizes = QUICK_SIZES if options.quick else SIZES
        listops.generate(ListopsPlan(seed=1, **sizes, **lengths), data, options.jobs)
    data_bin = data.absolute() / "data-bin"
    files = (path for path in sorted(data_bin.rglob("*")) if path.suffix in (".bin", ".idx"))
    labels = {split: read_labels(data_bin, split) for split in SPLITS}
    digests = {path.relative_to(data_bin).as_posix(): file_sha256(path) for path in files}
    keep_settings(options.out / "data.json", digests)
    # Accuracy on the test split of always naming its most frequent class, per cent.
    majority = 100.0 * labels["test"].bincount().max().item() / len(labels["test"])
    return Data(
        data_bin, {"examples": {split: len(classes) for split, classes in labels.items()}, "majority": majority}
    )


def validate(options: Arena, data: Data, folder: Path) -> None:
    """Evaluate the selected checkpoint in ``folder`` on the test split and store the result there, unless it exists."""
    if not (folder / TEST).exists():
        log = folder / "test.log"
        run(options.validate_command(data.folder, folder / "checkpoints" / "checkpoint_best.pt"), log, threads=1)
        values = fairseq_log.parse_validation(log.read_text(encoding="utf-8").splitlines(), "test")
        write_json(folder / TEST, values)


def read(options: Arena, folder: Path, known: Record) -> Record | None:
    """The accuracies of a complete training, per cent; None if its test split has not been evaluated."""
    if not (folder / TEST).exists():
        return None
    points = read_points(folder)
    best = max((point for point in points if point.split == "valid"), key=lambda point: point.values["accuracy"])
    return {
        "valid": best.values["accuracy"],  # the best evaluation
        "update": best.update,
        "test": read_json(folder / TEST, accuracy=float)["accuracy"],  # of the checkpoint that valid selected
        "best_test": max(point.values["accuracy"] for point in points if point.split == "test"),
    }


def measure(options: Arena, data: Data, compared: Results) -> Record:
    """Steps per second of all models; measured only if no result with the same arguments is stored."""
    if compared.interrupted:
        return {"speeds": [], "speed_batch": options.speed_batch}
    arguments = [str(word) for word in options.speed_arguments()]
    path = options.out / "speed.json"
    kinds = {"arguments": list[str], "measured": list[Speed]}
    if not path.exists() or read_json(path, **kinds)["arguments"] != arguments:
        log = options.out / "logs" / "speed.log"
        run(python_command("-m", "recipes.lra.speed", *arguments), log, threads=1)
        measured = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
        write_json(path, {"arguments": arguments, "measured": measured})
    speeds = read_json(path, **kinds)["measured"]
    return {"speeds": [speed._asdict() for speed in speeds], "speed_batch": options.speed_batch}


def columns(options: Arena, facts: Record) -> list[Column]:
    """Columns of the table of accuracies."""

    def paper(name: str) -> str:
        accuracy = published.accuracy(name, options.task)
        return MISSING if accuracy is None else f"{accuracy:.2f}"

    return [
        TITLE,
        Column("architecture", known=lambda name: f"{MODELS[name].architecture}_lra_{options.task}"),
        PARAMETERS,
        Column("selected on valid", mean("test", 1)),
        Column("best on test", mean("best_test", 1)),
        SEEDS,
        Column("seconds", lambda records: f"{statistics.mean(record['seconds'] for record in records):.0f}"),
        Column("published", known=paper),
    ]


def notes(options: Arena, facts: Record) -> list[str]:
    """Notes below the table of accuracies."""
    splits = ", ".join(f"{count:,} {split}" for split, count in facts["examples"].items())
    return [
        f"accuracy in per cent, mean ± standard deviation over the seeds; guessing gives "
        f"{TASKS[options.task].chance:.0f}, always the most frequent class of the test split {facts['majority']:.1f}",
        "selected on valid: the checkpoint with the best accuracy on the valid split, whose test split is read once",
        "best on test: the best of all evaluations on the test split, as the released code reports it: no estimate"
        " of anything unseen",
        f"{options.updates:,} updates of {options.batch_size} sequences of at most {options.length:,} tokens "
        f"({splits}), width {options.width}, {options.layers} layers (FLASH twice as many units), learning rate "
        f"{options.lr:g} for all",
        "published: Table 2 of the Flowformer paper, for the Arena's lengths, sizes and budgets; another experiment",
    ]


_STEP = {TRAINING: "loss and gradients, no optimizer", INFERENCE: "no gradients"}


def extra_tables(options: Arena, facts: Record, records: list[Record]) -> list[Table]:
    """Speeds of training and inference, and memory."""

    def steps(speeds: list[Record]) -> str:
        faster = speeds[0]["faster"]
        return f"{speeds[0]['steps_per_second']:.2f}" + ("" if faster is None else f" ({faster:.2f}x)")

    def of_lengths(title: str, kind: str, cell: Callable[[list[Record]], str], notes: list[str]) -> Table:
        speeds = _speeds(facts, kind)
        lengths = by_length(sorted({speed["length"] for speed in speeds}), cell)
        return table(title, [TITLE, *lengths], options.models, Results(speeds, {}), notes)

    def of_steps(kind: str) -> Table:
        notes = [
            f"a step: {facts['speed_batch']} sequences without padding, on one thread; {_STEP[kind]}",
            "median of interleaved rounds; in parentheses how many steps are made in the time of one of softmax, the "
            "median over the rounds",
        ]
        return of_lengths(f"Steps per second, {kind}", kind, steps, notes)

    memory = of_lengths(
        "Memory of a training step, MiB",
        TRAINING,
        largest("peak_bytes", 2**-20),
        ["allocated by torch in one training step, beyond weights and gradients"],
    )
    return [of_steps(TRAINING), of_steps(INFERENCE), memory]


def _speeds(facts: Record, kind: str) -> list[Record]:
    return [speed for speed in facts["speeds"] if speed["kind"] == kind]


def draw(options: Arena, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Draw the accuracies of all seeds against guessing, and the speed of training against length."""
    with plt.rc_context(STYLE):
        size = (13, max(4.2, 0.28 * len(options.models)))
        figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
        _draw_accuracies(left, options, facts, records)
        _draw_speeds(right, options, _speeds(facts, TRAINING))
        save(figure, path, dpi=130)


def _draw_accuracies(axes: Axes, options: Arena, facts: Record, records: Sequence[Record]) -> None:
    values = {MODELS[name].title: [record["test"] for record in of_model(records, name)] for name in options.models}
    seeds_in_rows(axes, values)
    axes.axvline(facts["majority"], color="gray", linestyle="--")
    axes.annotate(" always the most frequent class", (facts["majority"], -0.55), fontsize=8, color="gray", ha="left")
    axes.set_xlabel("accuracy on the test split, %")
    axes.set_title(f"{TASKS[options.task].title}, a dot for each seed, a line for the mean")


def _draw_speeds(axes: Axes, options: Arena, speeds: Sequence[Record]) -> None:
    points = {
        MODELS[name].title: [(speed["length"], speed["steps_per_second"]) for speed in of_model(speeds, name)]
        for name in options.models
    }
    lines_by_length(axes, points)
    axes.set(xlabel="tokens in a sequence", ylabel="training steps per second")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


EXPERIMENT = Experiment(
    command="recipes.lra.compare",
    about=__doc__.splitlines()[0],
    options=Arena,
    title=lambda options, facts: f"{TASKS[options.task].title}, accuracy",
    columns=columns,
    notes=notes,
    prepare=prepare,
    read=read,
    evaluate=validate,
    measure=measure,
    extra_tables=extra_tables,
    picture=draw,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
