"""Train models with several attentions and seeds to act from own data, let them act, and print their returns.

``python -m recipes.offline_rl.compare --minutes 30`` from the checkout's root: data is collected, Decision Transformers
are trained through fairseq-train and evaluated, and so are ``bc`` and ``awac``, which have no attention. An interrupted
comparison goes on where it was.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from fairseq.models import ARCH_MODEL_REGISTRY

from common.command_parser import CommandParser
from fairseq_plugin.data.episode_folder import EpisodeDescription, read_description
from fairseq_plugin.tasks.offline_rl import read_context

from ..shared.additions import addition_arguments, mechanism_of
from ..shared.architectures import architectures_of, option_prefix
from ..shared.comparison import NO_READER, planned_trainings, show, train_and_read
from ..shared.json_files import read_json, write_json
from ..shared.scripts import command_line, positive_int, positive_number, script
from ..shared.settings import keep_settings
from ..shared.trainings import Trained, read_parameters, read_points
from ..shared.working_folder import working_folder
from .acting import Evaluation, Played, evaluate, load
from .collect import collect
from .results import Plan, Result, report
from .speed import seconds_per_update

COMMAND = "recipes.offline_rl.compare"
SUFFIX = "_decision"
#: The type of ``--archs``.
architectures = architectures_of(SUFFIX, additions=True)
DEFAULT_NAMES = ("flowformer", "softmax", "linear")
#: Smaller than the paper's models, which would need a day on a CPU.
SIZES = "--decoder-layers 2 --decoder-embed-dim 64 --decoder-attention-heads 4".split()
#: How many times the updates of a Transformer those without attention have; one of theirs costs a fraction of its time.
FURTHER_UPDATES = {"bc": 10, "awac": 10}
#: Of the time: for the search of a policy, and for the trainings. What remains is for acting.
SEARCH_SHARE, TRAINING_SHARE = 0.1, 0.6
#: Seconds that fairseq needs before the first update.
_START = 12.0
#: A training has so many epochs; what an interruption may cost is one.
EPOCHS = 10
_TARGETS = 5


def train_arguments(data: Path, name: str, context: str, updates: int, seed: int) -> list[object]:
    """fairseq-train's arguments: the authors' optimiser, with a shorter warmup; whole episodes in smaller batches.

    Those without attention have their own sizes, and AWAC its own rate and no clipping.
    """
    batch = 4 if read_context("--context", context) is None else 64
    updates *= FURTHER_UPDATES.get(name, 1)
    architecture = mechanism_of(name) + SUFFIX
    criterion = ARCH_MODEL_REGISTRY[architecture].criterion
    rate, clip = ("0.0003", "0") if name == "awac" else ("0.001", "0.25")
    return [
        data,
        *("--user-dir", "fairseq_plugin", "--task", "offline_rl", "--criterion", criterion, "--disable-validation"),
        *("--arch", architecture, *addition_arguments(name, option_prefix(architecture)), "--context", context),
        *([] if name in FURTHER_UPDATES else SIZES),
        *("--batch-size", batch, "--windows-per-epoch", batch * max(1, updates // EPOCHS)),
        *("--optimizer", "adam", "--weight-decay", "0.0001", "--lr", rate, "--clip-norm", clip),
        *("--lr-scheduler", "fixed"),
        *("--warmup-updates", max(1, updates // EPOCHS), "--max-update", updates, "--seed", seed),
        *("--no-epoch-checkpoints", "--log-interval", max(1, updates // 50)),
        *NO_READER,
    ]


def plan_updates(out: Path, data: Path, options: argparse.Namespace) -> int:
    """The updates of each training that fill its share of the time here; measured once, and kept in ``out``."""
    path = out / "updates.json"
    if options.updates is not None:
        return options.updates
    if not path.exists():
        commands = {name: train_arguments(data, name, options.context, EPOCHS, 1) for name in options.models}
        seconds = [FURTHER_UPDATES.get(name, 1) * seconds_per_update(commands[name]) for name in commands]
        each = TRAINING_SHARE * 60.0 * options.minutes * options.jobs / options.seeds - _START * len(seconds)
        updates = max(EPOCHS, int(each / sum(seconds)))
        write_json(path, {"updates": updates})
    return read_json(path, updates=int)["updates"]


def act(folder: Path, plan: Plan) -> Evaluation:
    """The evaluation of the training in ``folder``, kept there."""
    path = folder / "returns.json"
    settings = {"environment": plan.environment, "targets": plan.targets, "episodes": plan.episodes}
    if path.exists():
        stored = read_json(path, settings=dict, played=list[Played], milliseconds=float)
        if stored["settings"] == settings:
            return Evaluation(stored["played"], stored["milliseconds"])
    hub = load(folder / "checkpoints" / "checkpoint_last.pt")
    found = evaluate(hub, plan.environment, plan.targets, plan.episodes)
    content = {"settings": settings, "milliseconds": found.milliseconds}
    content["played"] = [one._asdict() for one in found.episodes]
    write_json(path, content)
    return found


def read_result(plan: Plan, name: str, seed: int, folder: Path, trained: Trained) -> Result:
    """A complete training, with what its model does."""
    points = [point for point in read_points(folder) if point.split == "train_inner"]
    played = act(folder, plan)
    print(f"  {name}, seed {seed}: {played.milliseconds:.1f} ms an action", flush=True)
    return Result(
        name,
        seed,
        read_parameters(folder),
        [point.update for point in points],
        [point.values.get("action_mse", point.values["loss"]) for point in points],
        played.episodes,
        played.milliseconds,
        trained.seconds,
        trained.command,
    )


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.offline_rl.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="HalfCheetah-v5", metavar="NAME", help="of gymnasium (%(default)s)")
    parser.add_argument("--minutes", type=positive_number, default=30.0, help="for everything, about (%(default)s)")
    parser.add_argument("--seeds", type=positive_int, default=3, help="trainings of each model (%(default)s)")
    names = ",".join(DEFAULT_NAMES)
    parser.add_argument(
        "--models",
        "--archs",
        type=architectures,
        nargs="+",
        metavar="NAME",
        help=f"architectures without {SUFFIX}: of any causal mechanism, also with additions, as in "
        f"linear+forget+short_conv, bc and awac ({names})",
    )
    parser.add_argument("--context", default="10", metavar="K|full", help="steps of a window (%(default)s)")
    parser.add_argument("--updates", type=positive_int, help="of each training; default: as many as the time allows")
    parser.add_argument("--episodes", type=positive_int, default=5, help="for each target (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=1, help="trainings at a time, of one thread each")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: work/offline_rl/compare/ENV")
    return parser


def parsed(arguments: Iterable[str] | None) -> argparse.Namespace:
    """The options, ``models`` as one list without repetitions."""
    options = parser().parse_args(arguments)
    options.models = list(dict.fromkeys(itertools.chain(*(options.models or [DEFAULT_NAMES]))))
    return options


def collected(out: Path, environment: str, minutes: float) -> EpisodeDescription:
    """The data of the comparison, collected unless that is complete."""
    data = out / "behaviour" / "data"
    return read_description(data) if data.exists() else collect(environment, minutes, data.parent)


@script("compare")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parsed(arguments)
    read_context("--context", options.context)
    out = (options.out or Path("work/offline_rl/compare") / options.env).absolute()
    with working_folder(out, COMMAND):
        return _compare(options, out, command_line(COMMAND, arguments))


def _compare(options: argparse.Namespace, out: Path, command: str) -> int:
    started = time.monotonic()
    begun = {"--env": options.env, "--minutes": options.minutes, "--context": options.context}
    keep_settings(out / "settings.json", begun)
    described = collected(out, options.env, SEARCH_SHARE * options.minutes)
    data = out / "behaviour" / "data"
    updates = plan_updates(out, data, options)
    targets = [round(x, 1) for x in np.linspace(described.lowest, described.highest, _TARGETS).tolist()]
    seeds = list(range(1, options.seeds + 1))
    plan = Plan(options.env, options.models, seeds, options.context, updates, targets, options.episodes)

    def arguments(name: str, seed: int) -> list[object]:
        return train_arguments(data, name, options.context, updates, seed)

    planned = planned_trainings(plan.names, seeds, arguments)
    compared = train_and_read(planned, out, options.jobs, functools.partial(read_result, plan))
    show(out, report(plan, described, compared), command, started)
    return compared.status


if __name__ == "__main__":
    sys.exit(main())
