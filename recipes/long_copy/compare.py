"""Train every encoder-decoder to copy marked passages from long sources, with one budget; print what each gets right.

``python -m recipes.long_copy.compare --file FILE --seeds 3`` from the checkout's root, through fairseq-train and
fairseq-generate. Run again, it goes on where it was interrupted.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..shared import fairseq_log
from ..shared.commands import CommandFailed, run, shown_path
from ..shared.json_files import read_json, write_json
from ..shared.scripts import command_line, positive_int, script
from ..shared.settings import keep_settings
from ..shared.tables import describe_run
from ..shared.trainings import read_points, read_trained, train_all
from ..shared.working_folder import working_folder
from .generated import Counted, count
from .plan import DEFAULT_MODELS, STOCK, Plan, folder_name, parse
from .prepare import Data, add_options, chosen_data, prepare
from .results import Result, write

COMMAND = "recipes.long_copy.compare"
UPDATES, EVALUATIONS = 4_000, 10
#: Defaults to see that everything runs; nothing is learned.
QUICK = {"source_tokens": 64, "spans": 2, "span_tokens": 3, "train": 40, "valid": 4, "test": 4, "updates": 4}


def generate(plan: Plan, data: Path, folder: Path) -> tuple[Counted, int]:
    """What the model in ``folder`` generates, and the largest memory meanwhile; kept there.

    Raises:
        CommandFailed: fairseq-generate failed.
    """
    path = folder / "generated.json"
    if not path.exists():
        log = folder / "generate.log"
        finished = run(plan.generate_command(data, folder / "checkpoints" / "checkpoint_best.pt"), log, threads=1)
        counted = count(log.read_text(encoding="utf-8").splitlines(), plan.layout.span_tokens)
        write_json(path, {"counted": counted._asdict(), "peak_bytes": finished.peak_bytes})
    stored = read_json(path, "counted", "peak_bytes")
    return Counted(**stored["counted"]), stored["peak_bytes"]


def read_result(plan: Plan, data: Path, folder: Path, name: str, seed: int) -> Result | None:
    """A training with what its model generates; None if it is not complete."""
    trained = read_trained(folder)
    if trained is None:
        return None
    counted, generate_bytes = generate(plan, data, folder)
    points = read_points(folder)
    valid = [point for point in points if point.split == "valid"]
    trainings = [point.values["ups"] for point in points if point.split == "train_inner"]
    return Result(
        name,
        seed,
        fairseq_log.parse_parameters((folder / "train.log").read_text(encoding="utf-8").splitlines()),
        min(valid, key=lambda point: point.values["loss"]).update,
        [(point.update, point.values["accuracy"]) for point in valid],
        counted,
        1.0 / sorted(trainings)[len(trainings) // 2],
        trained.peak_bytes,
        generate_bytes,
        trained.seconds,
        trained.command,
    )


def read_results(plan: Plan, data: Path, runs: Path, failed: dict[str, str]) -> Iterator[Result]:
    """The complete trainings of the plan, one after another; why a model did not generate is put into ``failed``."""
    for seed in range(1, plan.seeds + 1):
        for name in plan.models:
            folder = runs / folder_name(name, seed)
            try:
                found = read_result(plan, data, folder, name, seed)
            except CommandFailed as error:
                print(f"  {error}", file=sys.stderr)
                failed[folder.name] = str(error).strip().splitlines()[-1]
                continue
            if found is not None:
                yield found


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


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    parser = argparse.ArgumentParser(prog="python -m recipes.long_copy.compare", description=__doc__.splitlines()[0])
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
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate, of all models (%(default)s)")
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
    """What the options say."""
    return Plan(
        list(dict.fromkeys(options.models)),
        options.seeds,
        chosen_data(options, seed=1).layout,
        options.updates,
        options.batch_size,
        options.width,
        options.layers,
        options.heads,
        options.lr,
        min(EVALUATIONS, options.updates),
        options.beam,
        shlex.split(options.more),
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
    # More models and seeds may be added to a folder, but they share all the rest.
    shared = {key: value for key, value in plan._asdict().items() if key not in ("models", "seeds", "layout")}
    data_bin = prepare(options.file, out, data)
    keep_settings(out / "settings.json", shared)
    failed: dict[str, str] = {}
    results: list[Result] = []
    try:
        failed = train_all(plan.trainings(data_bin), out / "runs", options.jobs).failed
        for found in read_results(plan, data_bin, out / "runs", failed):
            results.append(found)
    except KeyboardInterrupt:
        print("\nInterrupted. Run again to go on; what is complete follows.", file=sys.stderr)
    run_info = describe_run(command, time.monotonic() - started)
    print("\n" + write(out, plan, data, results, failed, run_info))
    print(f"\nThe same as Markdown, JSON and a picture: {shown_path(out)}")
    return 0 if len(results) == len(plan.models) * plan.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
