"""Train every encoder-decoder to copy marked passages from long sources, with one budget; print what each gets right.

``python -m recipes.long_copy.compare --file FILE --seeds 3`` from the checkout's root, through fairseq-train and
fairseq-generate. Run again, it goes on where it was interrupted.
"""

import argparse
import functools
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.command_parser import CommandParser

from ..shared.commands import run
from ..shared.comparison import show, train_and_read
from ..shared.json_files import read_json, write_json
from ..shared.scripts import command_line, positive_int, positive_number, script
from ..shared.settings import keep_settings
from ..shared.trainings import Trained, read_parameters, read_points
from ..shared.working_folder import working_folder
from .generated import Counted, count
from .plan import DEFAULT_MODELS, STOCK, Plan, parse
from .prepare import Data, add_options, chosen_data, prepare
from .results import Result, report

COMMAND = "recipes.long_copy.compare"
UPDATES, EVALUATIONS = 4_000, 10
#: In the folder of a training: what is right of what its model generated.
GENERATED = "generated.json"
#: Defaults to see that everything runs; nothing is learned.
QUICK = {"source_tokens": 64, "spans": 2, "span_tokens": 3, "train": 40, "valid": 4, "test": 4, "updates": 4}


def generate(plan: Plan, data: Path, folder: Path) -> None:
    """Let the model in ``folder`` generate, and keep there what is right, unless it has been done.

    Raises:
        CommandFailed: fairseq-generate failed.
    """
    if not (folder / GENERATED).exists():
        log = folder / "generate.log"
        finished = run(plan.generate_command(data, folder / "checkpoints" / "checkpoint_best.pt"), log, threads=1)
        counted = count(log.read_text(encoding="utf-8").splitlines(), plan.layout.span_tokens)
        write_json(folder / GENERATED, {"counted": counted._asdict(), "peak_bytes": finished.peak_bytes})


def read_result(name: str, seed: int, folder: Path, trained: Trained) -> Result | None:
    """A complete training with what its model generated; None if it has not."""
    if not (folder / GENERATED).exists():
        return None
    generated = read_json(folder / GENERATED, counted=Counted, peak_bytes=int)
    points = read_points(folder)
    valid = [point for point in points if point.split == "valid"]
    updates_per_second = sorted(point.values["ups"] for point in points if point.split == "train_inner")
    return Result(
        name,
        seed,
        read_parameters(folder),
        min(valid, key=lambda point: point.values["loss"]).update,
        [(point.update, point.values["accuracy"]) for point in valid],
        generated["counted"],
        1.0 / updates_per_second[len(updates_per_second) // 2],
        trained.peak_bytes,
        generated["peak_bytes"],
        trained.seconds,
        trained.command,
    )


def model(name: str) -> str:
    """A name of a model.

    Raises:
        argparse.ArgumentTypeError: there is none of that name.
    """
    try:
        if name != STOCK:
            parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.long_copy.compare", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--out", type=Path, default=Path("work/long_copy/compare"), help="default: %(default)s")
    parser.add_argument(
        "--models",
        nargs="+",
        type=model,
        default=DEFAULT_MODELS,
        metavar="NAME/CROSS",
        help=f"attention, and attention of the decoder to the encoder; or {STOCK}, fairseq's own; default: %(default)s",
    )
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=1, help="trainings at a time, a thread each (%(default)s)")
    parser.add_argument("--updates", type=positive_int, default=UPDATES, help="of every training (%(default)s)")
    parser.add_argument("--beam", type=positive_int, default=1, help="of fairseq-generate; 1 is greedy (%(default)s)")
    parser.add_argument(
        "--lr", type=positive_number, default=3e-3, help="highest learning rate, of all models (%(default)s)"
    )
    sizes = {"batch-size": 8, "width": 64, "layers": 1, "heads": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    parser.add_argument("--more", default="", metavar="ARGUMENTS", help="further arguments of fairseq-train")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only see that everything runs: other defaults, with which nothing is learned",
    )
    return parser


def chosen_plan(options: argparse.Namespace) -> Plan:
    """The plan with the options' values."""
    layout = chosen_data(options, seed=1).layout
    return Plan.chosen(
        options, layout=layout, evaluations=min(EVALUATIONS, options.updates), more=shlex.split(options.more)
    )


@script("compare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    known = parser()
    options = known.parse_args(arguments)
    if options.quick:
        known.set_defaults(**QUICK)
        options = known.parse_args(arguments)
    plan, data, out = chosen_plan(options), chosen_data(options, seed=1), options.out.absolute()
    with working_folder(out, COMMAND):
        return _compare(options, plan, data, out, command_line(COMMAND, arguments))


def _compare(options: argparse.Namespace, plan: Plan, data: Data, out: Path, command: str) -> int:
    started = time.monotonic()
    data_bin = prepare(options.file, out, data)
    # The layout is among the data's settings.
    keep_settings(out / "settings.json", {key: value for key, value in plan.settings().items() if key != "layout"})
    evaluate = functools.partial(generate, plan, data_bin)
    compared = train_and_read(plan.trainings(data_bin), out / "runs", options.jobs, read_result, evaluate)
    show(out, report(plan, data, compared), command, started)
    return compared.status


if __name__ == "__main__":
    sys.exit(main())
