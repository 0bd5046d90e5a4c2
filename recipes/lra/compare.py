"""Train every attention on a task of the Long Range Arena with one budget, and print accuracy, speed and memory.

``python -m recipes.lra.compare --task listops --length 256 --seeds 3`` from the checkout's root, through fairseq-train
and fairseq-validate. Run again, it goes on where it was interrupted.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path

from common.command_parser import CommandParser

from ..shared import fairseq_log
from ..shared.commands import python_command, run
from ..shared.comparison import show, train_and_read
from ..shared.json_files import read_json, write_json
from ..shared.scripts import command_line, positive_int, positive_number, script
from ..shared.settings import keep_settings
from ..shared.trainings import Trained, read_parameters, read_points
from ..shared.working_folder import working_folder
from . import listops, speed
from .examples import SPLITS, read_labels
from .listops_blocks import Plan as ListopsPlan
from .plan import MODELS, TABLES, TASKS, Plan, validate_command
from .results import Results, Score, report
from .speed import Speed

COMMAND = "recipes.lra.compare"
DEFAULT_MODELS = ["softmax", "flow", "linear", "flash", "daft_conv", "mixed_chunk"]
SPEED_LENGTHS = [1024, 2048, 3072, 4096]
UPDATES, EVALUATIONS = 1_500, 8
#: In the folder of a training: what its selected checkpoint reaches on the test split.
TEST = "test.json"
#: To see that everything runs; nothing is learned.
QUICK_UPDATES, QUICK_SPEED_LENGTHS = 8, [64, 128]
#: Expressions of a generated ListOps, and the shortest ones as a share of the longest.
SIZES = {"train": 64_000, "valid": 1_000, "test": 1_000}
QUICK_SIZES = {"train": 200, "valid": 40, "test": 40}
_SHORTEST = 16


def prepare(plan: Plan, out: Path, sizes: dict[str, int], processes: int) -> Path:
    """Generate ListOps of the plan's length below ``out``; returns its folder."""
    # --max-length is exclusive, and the first token stands before it.
    lengths = {"min_length": plan.length // _SHORTEST, "max_length": plan.length}
    listops.generate(ListopsPlan(seed=1, **sizes, **lengths), out / "data", processes)
    return out / "data"


def validate(plan: Plan, data: Path, folder: Path) -> None:
    """Evaluate the test split of the selected checkpoint in ``folder``, and keep it there, unless it has been."""
    if not (folder / TEST).exists():
        log = folder / "test.log"
        run(validate_command(plan, data, folder / "checkpoints" / "checkpoint_best.pt", "test"), log, threads=1)
        values = fairseq_log.parse_validation(log.read_text(encoding="utf-8").splitlines(), "test")
        write_json(folder / TEST, values)


def read_score(name: str, seed: int, folder: Path, trained: Trained) -> Score | None:
    """The accuracies of a complete training; None if its test split has not been evaluated."""
    if not (folder / TEST).exists():
        return None
    points = read_points(folder)
    best = max((point for point in points if point.split == "valid"), key=lambda point: point.values["accuracy"])
    return Score(
        name,
        seed,
        read_parameters(folder),
        best.values["accuracy"],
        best.update,
        read_json(folder / TEST, accuracy=float)["accuracy"],
        max(point.values["accuracy"] for point in points if point.split == "test"),
        trained.seconds,
        trained.peak_bytes,
        trained.command,
    )


def measure_speed(plan: Plan, out: Path, lengths: list[int], batch_size: int) -> list[Speed]:
    """Steps per second of all models, measured unless they have been with the same arguments."""
    arguments = [str(word) for word in speed.arguments(plan, lengths, batch_size)]
    path = out / "speed.json"
    if path.exists():
        stored = read_json(path, arguments=list[str], measured=list[Speed])
        if stored["arguments"] == arguments:
            return stored["measured"]
    log = out / "logs" / "speed.log"
    run(python_command("-m", "recipes.lra.speed", *arguments), log, threads=1)
    measured = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    write_json(path, {"arguments": arguments, "measured": measured})
    return [Speed(**one) for one in measured]


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="listops", help="default: %(default)s")
    parser.add_argument(
        "--data", type=Path, help="the folder that a prepare command wrote; default: a ListOps that is generated"
    )
    parser.add_argument("--out", type=Path, default=Path("work/lra/compare"), help="default: %(default)s")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--models", nargs="+", choices=MODELS, default=DEFAULT_MODELS, help="default: %(default)s")
    rows.add_argument("--table", choices=TABLES, help="the rows of this table of the Flowformer paper, as --models")
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument(
        "--length", type=positive_int, help="tokens of the longest sequence, with the first; default: the task's"
    )
    parser.add_argument("--updates", type=positive_int, help=f"of every training; default: {UPDATES:,}")
    parser.add_argument(
        "--lr", type=positive_number, default=3e-3, help="highest learning rate, of all models (%(default)s)"
    )
    sizes = {"batch-size": 32, "width": 64, "layers": 1, "heads": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    parser.add_argument("--jobs", type=positive_int, default=1, help="trainings at a time, a thread each (%(default)s)")
    parser.add_argument(
        "--speed-lengths", type=positive_int, nargs="+", help=f"lengths to time; default: {SPEED_LENGTHS}"
    )
    parser.add_argument("--speed-batch", type=positive_int, default=2, help="sequences in a timed step (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


@script("compare")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.data is None and options.task != "listops":
        raise ValueError(f"--task is {options.task} without --data; allowed: the folder of its prepare command, too")
    if options.data is not None and not (options.data / "data-bin").is_dir():
        raise ValueError(f"--data is {options.data}, which has no data-bin; allowed: what a prepare command wrote")
    if options.table is not None:
        options.models = TABLES[options.table]
    plan = Plan.chosen(
        options,
        length=options.length or TASKS[options.task].longest + 1,
        updates=options.updates or (QUICK_UPDATES if options.quick else UPDATES),
        evaluations=min(EVALUATIONS, options.updates or EVALUATIONS),
    )
    out = options.out.absolute()
    with working_folder(out, COMMAND):
        return _compare(options, plan, out, command_line(COMMAND, arguments))


def _compare(options: argparse.Namespace, plan: Plan, out: Path, command: str) -> int:
    started = time.monotonic()
    keep_settings(out / "settings.json", plan.settings())
    data = options.data
    if data is None:
        data = prepare(plan, out, QUICK_SIZES if options.quick else SIZES, options.jobs)
    data_bin = data.absolute() / "data-bin"
    evaluate = functools.partial(validate, plan, data_bin)
    compared = train_and_read(plan.trainings(data_bin), out / "runs", options.jobs, read_score, evaluate)
    lengths = options.speed_lengths or (QUICK_SPEED_LENGTHS if options.quick else SPEED_LENGTHS)
    speeds = [] if compared.interrupted else measure_speed(plan, out, sorted(set(lengths)), options.speed_batch)
    labels = {split: read_labels(data_bin, split) for split in SPLITS}
    results = Results(
        plan,
        {split: len(found) for split, found in labels.items()},
        100.0 * labels["test"].bincount().max().item() / len(labels["test"]),
        compared,
        speeds,
        options.speed_batch,
    )
    show(out, report(results), command, started)
    return compared.status


if __name__ == "__main__":
    sys.exit(main())
