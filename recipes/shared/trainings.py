"""A set of named fairseq trainings that survive an interruption.

Each training has its own folder: ``settings.json``, the command line it was begun with; ``train.log``;
``checkpoints``; and, once it is complete, ``result.json``. A second run skips trainings with a result, and continues
interrupted ones from their last checkpoint.
"""

import contextlib
import datetime
import re
import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from . import fairseq_log, fairseq_training
from .commands import CommandFailed, python_command
from .fairseq_log import Point
from .json_files import read_record, write_json
from .last_checkpoint import restore_last
from .settings import check_settings, keep_settings
from .tables import describe_run
from .working_folder import register, working_folder

PROGRAM = ("-m", "fairseq_cli.train")
#: The recorded owner of the folders, unless they lie in the folder of a comparison.
_COMMAND = "recipes.shared.trainings"
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \|")


class Training(NamedTuple):
    """One training: the name of its folder, and fairseq-train's arguments without --save-dir and --log-format.

    A method that is not a network has its own ``program``, which Python runs with only ``arguments``; it logs its
    results as fairseq-train does, and starts over after an interruption.
    """

    name: str
    arguments: list[object]
    program: tuple[object, ...] | None = None
    threads: int | None = 1  # of torch; None: torch's default


class TrainingResult(NamedTuple):
    """Record of a complete training, stored next to its log and its checkpoints."""

    name: str
    command: str
    seconds: float  # of all its parts if it was interrupted; from the times in its log
    peak_bytes: int  # of the process, in its last part
    date: str
    machine: str
    versions: str


class TrainingResults(NamedTuple):
    """Name -> result of the complete trainings, and name -> reason of the failed ones."""

    trained: dict[str, TrainingResult]
    failed: dict[str, str]


def train_all(
    trainings: Sequence[Training], out: Path, jobs: int = 1, program: Sequence[object] = PROGRAM
) -> TrainingResults:
    """Run the trainings that are not complete in ``out``, ``jobs`` at a time, with progress bars.

    One training's failure does not stop the others. Python runs ``program`` with the training's arguments.

    Raises:
        ValueError: two trainings have the same name, or a training's folder in ``out`` was begun with other arguments,
            holds foreign files, or is in use by another run. Nothing is trained then.
    """
    names = [training.name for training in trainings]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} trainings are called {name}; allowed: a name for each")
    for training in trainings:
        check_settings(out / training.name / "settings.json", _settings(training.arguments))
    with contextlib.ExitStack() as folders:
        for name in names:
            folders.enter_context(working_folder(out / name, _COMMAND, "the folder of a training"))
        return _train_all(trainings, out, jobs, program)


def _train_all(trainings: Sequence[Training], out: Path, jobs: int, program: Sequence[object]) -> TrainingResults:
    names = [training.name for training in trainings]
    trained = {name: result for name in names if (result := read_trained(out / name)) is not None}
    failed: dict[str, str] = {}
    waiting = [training for training in trainings if training.name not in trained]
    stopped, started = threading.Event(), time.monotonic()
    bar = tqdm(total=len(names), initial=len(trained), desc="trainings", unit="", disable=None)
    with bar, ThreadPoolExecutor(jobs) as pool:
        futures = {
            pool.submit(_train, training, out / training.name, program, stopped): training.name for training in waiting
        }
        try:
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    trained[futures[future]] = future.result()
                except CommandFailed as error:
                    tqdm.write(f"  {error}")
                    failed[futures[future]] = failure(error)
                bar.update()
                tqdm.write(pace(futures[future], done, len(waiting), started))
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return TrainingResults({name: trained[name] for name in names if name in trained}, failed)


def pace(name: str, done: int, total: int, started: float) -> str:
    """A line for a log, which shows no bar: what was completed last, how much there is, and minutes that remain.

    Args:
        started: ``time.monotonic()`` when the first of ``total`` began.
    """
    minutes = (time.monotonic() - started) / 60
    return f"  {name}: {done} of {total}, {minutes:.1f} minutes; about {minutes / done * (total - done):.1f} remain"


def read_trained(folder: Path) -> TrainingResult | None:
    """The result of the training in ``folder``; None if it is not complete."""
    path = folder / "result.json"
    if not path.exists():
        return None
    return read_record(path, TrainingResult)


def read_points(folder: Path) -> list[Point]:
    """The logged points of the training in ``folder``, in order, as if it had not been interrupted."""
    return fairseq_log.parse_points((folder / "train.log").read_text(encoding="utf-8").splitlines())


def read_parameters(folder: Path) -> int:
    """The number of parameters of the model in ``folder``, from its log."""
    return fairseq_log.parse_parameters((folder / "train.log").read_text(encoding="utf-8").splitlines())


def failure(error: Exception) -> str:
    """The last line of a message, which has the reason."""
    return str(error).strip().splitlines()[-1]


def _train(training: Training, folder: Path, program: Sequence[object], stopped: threading.Event) -> TrainingResult:
    """Start or continue a training; the result is written last."""
    keep_settings(folder / "settings.json", _settings(training.arguments))
    checkpoints = register(folder / "checkpoints")
    restore_last(checkpoints)
    command = python_command(*program, *training.arguments, "--save-dir", checkpoints, "--log-format", "json")
    if training.program is not None:
        command = python_command(*training.program, *training.arguments)
    log = folder / "train.log"
    options = _settings(training.arguments)
    by_update = "--max-update" in options
    total = int(options.get("--max-update" if by_update else "--max-epoch", 0)) or None
    finished, lines = fairseq_training.train(
        command, log, total, training.name, by_update=by_update, append=True, threads=training.threads, stopped=stopped
    )
    run = describe_run(shlex.join(command), finished.seconds)
    trained = TrainingResult(
        training.name,
        run.command,
        logged_seconds(lines),
        finished.peak_bytes,
        run.date,
        run.machine,
        run.versions,
    )
    write_json(folder / "result.json", trained._asdict())
    return trained


def logged_seconds(lines: Iterable[str]) -> float:
    """The seconds between the first and the last time in a log, summed over the parts that begin with a command."""
    seconds, first, last = 0.0, None, None
    for line in lines:
        if line.startswith("$ "):
            seconds += (last - first).total_seconds() if first is not None else 0.0
            first = last = None
        elif match := _TIME.match(line):
            last = datetime.datetime.fromisoformat(match[1])
            first = first or last
    return seconds + ((last - first).total_seconds() if first is not None else 0.0)


def _settings(arguments: Iterable[object]) -> dict[str, str]:
    """Option -> its arguments, as a user would compare them; arguments before the first option are the data."""
    settings: dict[str, list[str]] = {}
    name = "data"
    for argument in python_command(*arguments)[1:]:
        if argument.startswith("--"):
            name = argument
            settings[name] = []
        else:
            settings.setdefault(name, []).append(argument)
    return {name: " ".join(values) for name, values in settings.items()}
