"""Train classifiers of time series with several attentions and seeds, and print their accuracy beside the paper's.

``python -m recipes.time_series.compare --dataset JapaneseVowels --seeds 5`` from the checkout's root, through
fairseq-train, with the authors' training; methods that are no networks are fitted by ``recipes.time_series.classify``.
An interrupted comparison goes on where it was.
"""

import argparse
import functools
import itertools
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from common.command_parser import CommandParser

from ..shared.architectures import known_names
from ..shared.commands import shown_path
from ..shared.comparison import NO_READER, Planned, planned_trainings, show, train_and_read
from ..shared.reach import reach_arguments
from ..shared.scripts import command_line, positive_int, script
from ..shared.trainings import Trained, Training, read_parameters, read_points
from ..shared.working_folder import working_folder
from . import prepare
from .classify import CLASSIFIERS, RANDOM
from .results import Earlier, Plan, Result, read, report

COMMAND = "recipes.time_series.compare"
SUFFIX = "_time_series"
#: Trained only if asked for: a second name of flowformer, and mechanisms that FLASH was compared with.
NOT_BY_DEFAULT = ("flow", "combiner", "quadratic")
EPOCHS = {"PEMS-SF": 400}
DEFAULT_EPOCHS = 100
#: The authors' script has RAdam for all data sets but one.
OPTIMIZERS = {"SpokenArabicDigits": "adam"}
#: Epochs between two checkpoints, which is what an interruption may cost. Fewer where the last epoch would have none.
SAVE_INTERVAL = 10
#: What Python runs for a method that is no network.
CLASSIFY = ("-m", "recipes.time_series.classify")
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 256


def train_arguments(data: Path, plan: Plan, name: str, seed: int, longest: int) -> list[object]:
    """fairseq-train's arguments: the authors' optimiser, batch, clipping, epochs, and evaluation every two epochs."""
    return [
        data,
        *"--user-dir fairseq_plugin --task time_series_classification --criterion sentence_prediction".split(),
        *("--arch", name + SUFFIX, *chunk_arguments(name, longest), *reach_arguments(name, longest)),
        *("--optimizer", OPTIMIZERS.get(plan.dataset, "radam"), "--lr", "0.001", "--lr-scheduler", "fixed"),
        *"--clip-norm 4.0 --batch-size 16 --required-batch-size-multiple 1".split(),
        *("--max-epoch", plan.epochs, "--seed", seed),
        *("--valid-subset", "test", "--batch-size-valid", 128, "--validate-interval", plan.validate_interval),
        *"--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric".split(),
        *("--save-interval", math.gcd(SAVE_INTERVAL, plan.epochs), "--no-epoch-checkpoints"),
        *("--log-interval", 1_000_000, *NO_READER),
    ]


def chunk_arguments(name: str, longest: int) -> list[object]:
    """Chunks for the mechanisms that have them: about two to a series, at most FLASH's 256 steps."""
    option = {"flash": "--flash-chunk-size", "mixed_chunk": "--mixed-chunk-chunk-size"}.get(name)
    if option is None:
        return []
    return [option, min(LARGEST_CHUNK, max(SMALLEST_CHUNK, 2 ** round(math.log2(longest / 2))))]


def read_result(plan: Plan, name: str, seed: int, folder: Path, trained: Trained) -> Result:
    """A complete training; of a method that is no network, without parameters and with one accuracy.

    Raises:
        ValueError: its log lacks an evaluation or the number of parameters.
    """
    points = [point for point in read_points(folder) if point.split == "test"]
    if name in CLASSIFIERS and points:
        return Result(name, seed, 0, [points[-1].values["accuracy"]], trained.seconds, trained.command)
    if [point.epoch for point in points] != plan.evaluated:
        epochs = ", ".join(str(point.epoch) for point in points)
        raise ValueError(
            f"{shown_path(folder)}/train.log has evaluations after epochs {epochs or 'none'}; "
            f"allowed: after every {plan.validate_interval} of {plan.epochs}"
        )
    accuracies = [point.values["accuracy"] for point in points]
    return Result(name, seed, read_parameters(folder), accuracies, trained.seconds, trained.command)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.time_series.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="JapaneseVowels", metavar="NAME", help="as for prepare (%(default)s)")
    parser.add_argument(
        "--file", type=Path, metavar="ZIP_OR_TS", help="a copy of the data set you have, as for prepare"
    )
    parser.add_argument("--seeds", type=positive_int, default=5, help="trainings of each model (%(default)s)")
    names = ",".join(default_names())
    parser.add_argument(
        "--models",
        "--archs",
        type=models,
        nargs="+",
        metavar="NAME",
        help=f"architectures without {SUFFIX}, and {', '.join(CLASSIFIERS)}; default: {names}",
    )
    parser.add_argument("--epochs", type=positive_int, help=f"default: the authors', {DEFAULT_EPOCHS}; 400 for PEMS-SF")
    parser.add_argument("--jobs", type=positive_int, default=1, help="trainings at a time, of one thread each")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: work/time_series/compare/NAME")
    parser.add_argument(
        "--add", type=Path, metavar="JSON", help="results.json of another part, whose trainings are not made again"
    )
    return parser


def models(text: str) -> list[str]:
    """The type of ``--models``: names between commas, of architectures with or without ``SUFFIX`` or of methods.

    Raises:
        argparse.ArgumentTypeError: one that is not known.
    """
    names, known = [name.removesuffix(SUFFIX) for name in text.split(",")], [*CLASSIFIERS, *known_names(SUFFIX)]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(known)}")
    return names


def parsed(arguments: Iterable[str] | None) -> argparse.Namespace:
    """The options, ``models`` as one list without repetitions."""
    options = parser().parse_args(arguments)
    options.models = list(dict.fromkeys(itertools.chain(*(options.models or [default_names()]))))
    return options


def planned_fits(names: Iterable[str], seeds: list[int], data: Path) -> list[Planned]:
    """The methods that are no networks: those that draw nothing at random are fitted once."""
    return [
        Planned(name, seed, Training(f"{name}.{seed}", [data, "--model", name, "--seed", seed], CLASSIFY))
        for name in names
        for seed in (seeds if name in RANDOM else seeds[:1])
    ]


def default_names() -> list[str]:
    """The architectures that are trained unless told otherwise, the paper's first."""
    return sorted(set(known_names(SUFFIX)) - set(NOT_BY_DEFAULT), key=lambda name: (name != "flowformer", name))


@script("compare")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parsed(arguments)
    epochs = options.epochs or EPOCHS.get(options.dataset, DEFAULT_EPOCHS)
    plan = Plan(options.dataset, options.models, list(range(1, options.seeds + 1)), epochs)
    out = (options.out or Path("work/time_series/compare") / options.dataset).absolute()
    with working_folder(out, COMMAND, whole={"data": prepare.COMMAND}):
        return _compare(options, plan, out, command_line(COMMAND, arguments))


def _compare(options: argparse.Namespace, plan: Plan, out: Path, command: str) -> int:
    started = time.monotonic()
    earlier = read(options.add, plan) if options.add else Earlier([], [])
    described, _ = prepare.prepare(options.dataset, out / "data", options.file)

    def arguments(name: str, seed: int) -> list[object]:
        return train_arguments(out / "data", plan, name, seed, described.longest)

    known = [one for one in earlier.results if one.name in plan.names and one.seed in plan.seeds]
    there = {(one.name, one.seed) for one in known}
    networks = [name for name in plan.names if name not in CLASSIFIERS]
    others = [name for name in plan.names if name in CLASSIFIERS]
    planned = planned_fits(others, plan.seeds, out / "data") + planned_trainings(networks, plan.seeds, arguments)
    planned = [one for one in planned if (one.model, one.seed) not in there]
    compared = train_and_read(planned, out, options.jobs, functools.partial(read_result, plan))
    compared = compared._replace(outcomes=[*known, *compared.outcomes])
    show(out, report(plan, compared, earlier.runs), command, started)
    return compared.status


if __name__ == "__main__":
    sys.exit(main())
