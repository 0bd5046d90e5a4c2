"""Parts of an experiment: trainings that survive an interruption, their outcomes, and a table of the outcomes.

An outcome is a record (see ``experiment``), a dictionary with at least the ``model``.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from .commands import CommandFailed, shown_path
from .json_files import read_record, write_json
from .tables import MISSING, Run, Table, counted, describe_run, write_reports
from .trainings import Training, TrainingResult, failure, pace, read_trained, train_all

#: Arguments of fairseq-train that avoid the reader thread, which may abort a training at its end.
NO_READER = ("--num-workers", 0, "--data-buffer-size", 0)
_INTERRUPTED = "\nInterrupted. Run again to go on; what is complete follows."


class PlannedTraining(NamedTuple):
    """A training of a comparison."""

    model: str
    seed: int
    training: Training


class Results(NamedTuple):
    """The outcomes of the complete trainings, model by model; name of a training -> why it failed."""

    outcomes: list[Any]
    failed: dict[str, str]
    missing: int = 0  # trainings without an outcome
    interrupted: bool = False  # by Ctrl-C

    @property
    def status(self) -> int:
        """The exit status of a comparison: 0 if nothing is missing."""
        return int(self.missing > 0)


class Column(NamedTuple):
    """A table column: a fixed text for each model, or a summary of its outcomes."""

    header: str
    measured: Callable[[Sequence[Any]], str] | None = None
    known: Callable[[str], str] | None = None
    none: str = MISSING  # the cell of a model without outcomes

    def cell(self, model: str, outcomes: Sequence[Any]) -> str:
        """The text in the row of ``model``, whose outcomes are ``outcomes``."""
        if self.known is not None:
            return self.known(model)
        return self.measured(outcomes) if outcomes else self.none


#: Columns of more than one comparison.
MODEL = Column("model", known=str)
SEEDS = Column("seeds", lambda outcomes: str(len(outcomes)), none="0")


class Report(NamedTuple):
    """Results of a comparison to show and to store: tables, JSON and a picture."""

    tables: list[Table]
    content: dict[str, Any]  # of results.json, in addition to the run
    draw: Callable[[Path], None] | None  # to a file; None: nothing to draw
    picture: str = "results.png"


def planned_trainings(
    models: Sequence[str], seeds: Iterable[int], arguments: Callable[[str, int], list[object]]
) -> list[PlannedTraining]:
    """Every model with every seed; all models with the first seed before any with the second.

    ``arguments`` returns those of fairseq-train for a model and a seed, without the folder of checkpoints.
    """
    return [
        PlannedTraining(model, seed, Training(f"{model.replace('/', '-')}.{seed}", arguments(model, seed)))
        for seed in seeds
        for model in models
    ]


def train_and_read(
    planned: Sequence[PlannedTraining],
    out: Path,
    jobs: int,
    read: Callable[[str, int, Path, TrainingResult], Any],
    evaluate: Callable[[Path], None] | None = None,
) -> Results:
    """Run the trainings that are not complete in ``out``, ``jobs`` at a time, and read all complete outcomes.

    After Ctrl-C the outcomes so far are read.

    Args:
        read: returns the outcome of a model and a seed from the folder of its complete training; None if it has none.
        evaluate: runs a command on the folder of a complete training, unless that is done already.

    Raises:
        ValueError: raised by ``train_all`` or by ``read``.
    """
    failed: dict[str, str] = {}
    interrupted = False
    try:
        failed = train_all([item.training for item in planned], out, jobs).failed
        for item in planned if evaluate is not None else ():
            folder = out / item.training.name
            try:
                if read_trained(folder) is not None:
                    evaluate(folder)
            except CommandFailed as error:
                print(f"  {error}", file=sys.stderr)
                failed[folder.name] = failure(error)
    except KeyboardInterrupt:
        interrupted = True
        print(_INTERRUPTED, file=sys.stderr)
    outcomes = read_complete(planned, out, read)
    return Results(outcomes, failed, len(planned) - len(outcomes), interrupted)


def make_records(paths_and_makers: Iterable[tuple[Path, Callable[[], dict[str, Any]]]]) -> Results:
    """Make the record of each path in this process unless it is there; each is stored when it is complete.

    A bar shows the time that remains, and a line follows each record, for a log. After Ctrl-C the records so far are
    returned.

    Raises:
        ValueError: two records have the same path. Nothing is made then.
    """
    makers: dict[Path, Callable[[], dict[str, Any]]] = {}
    for path, maker in paths_and_makers:
        if path in makers:
            raise ValueError(f"two records are called {path.stem}; allowed: a name for each")
        makers[path] = maker
    waiting = [path for path in makers if not path.exists()]
    interrupted, started = False, time.monotonic()
    try:
        with tqdm(
            total=len(makers), initial=len(makers) - len(waiting), desc="trainings", unit="", disable=None
        ) as bar:
            for i, path in enumerate(waiting, 1):
                write_json(path, makers[path]())
                bar.update()
                tqdm.write(pace(path.stem, i, len(waiting), started))
    except KeyboardInterrupt:
        interrupted = True
        print(_INTERRUPTED, file=sys.stderr)
    records = [read_record(path, dict[str, Any]) for path in makers if path.exists()]
    return Results(records, {}, len(makers) - len(records), interrupted)


def read_complete(
    planned: Sequence[PlannedTraining], out: Path, read: Callable[[str, int, Path, TrainingResult], Any]
) -> list[Any]:
    """The outcomes of the trainings in ``out`` that are complete, model by model; ``read`` as in ``train_and_read``."""
    outcomes = []
    models = list(dict.fromkeys(item.model for item in planned))
    for item in sorted(planned, key=lambda one: models.index(one.model)):
        folder = out / item.training.name
        trained = read_trained(folder)
        outcome = None if trained is None else read(item.model, item.seed, folder, trained)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def of_model(outcomes: Iterable[Any], model: str) -> list[Any]:
    """The outcomes of one model."""
    return [outcome for outcome in outcomes if outcome["model"] == model]


def by_model(outcomes: Sequence[Any], models: Sequence[str]) -> dict[str, list[Any]]:
    """The outcomes of each model that has any."""
    return {model: model_outcomes for model in models if (model_outcomes := of_model(outcomes, model))}


def counted_seeds(outcomes_by_model: Mapping[str, Sequence[Any]]) -> str:
    """The number of seeds with which each model has outcomes: 3 seeds, 2 to 3 seeds."""
    numbers = [len(outcomes) for outcomes in outcomes_by_model.values()] or [0]
    fewest, most = min(numbers), max(numbers)
    return counted(most, "seed") if fewest == most else f"{fewest} to {most} seeds"


def rows(columns: Sequence[Column], models: Sequence[str], outcomes: Sequence[Any]) -> list[tuple[str, ...]]:
    """A row of a table for each model."""
    return [tuple(column.cell(model, of_model(outcomes, model)) for column in columns) for model in models]


def by_length(lengths: Iterable[int], cell: Callable[[list[Any]], str]) -> list[Column]:
    """A column for each ``length`` of outcomes: ``cell`` of the outcomes that have it."""

    def column(length: int) -> Column:
        def measured(outcomes: Sequence[Any]) -> str:
            of_length = [outcome for outcome in outcomes if outcome["length"] == length]
            return cell(of_length) if of_length else MISSING

        return Column(f"{length:,}", measured)

    return [column(length) for length in lengths]


def table(
    title: str,
    columns: Sequence[Column],
    models: Sequence[str],
    compared: Results,
    notes: Sequence[str],
    lacking: str = "not trained",
) -> Table:
    """A table with a row for each model, and a note for each training that is ``lacking``, with the reason."""
    failed = [f"{lacking}: {name}: {reason}" for name, reason in compared.failed.items()]
    header = tuple(column.header for column in columns)
    return Table(title, header, rows(columns, models, compared.outcomes), [*notes, *failed])


def write(out: Path, report: Report, run: Run) -> str:
    """Write results.txt, .md and .json and the picture to ``out``; returns the text."""
    out.mkdir(parents=True, exist_ok=True)
    plain = write_reports(out, report.tables, run, {"run": run._asdict(), **report.content})
    if report.draw is not None:
        report.draw(out / report.picture)
    return plain


def show(out: Path, report: Report, command: str, started: float) -> None:
    """``write`` and print; ``started`` is the time of ``time.monotonic`` at which ``command`` began."""
    print("\n" + write(out, report, describe_run(command, time.monotonic() - started)))
    formats = "Markdown and JSON" if report.draw is None else "Markdown, JSON and a picture"
    print(f"\nThe same as {formats}: {shown_path(out)}")
