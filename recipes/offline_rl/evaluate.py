"""Returns of trained models: ``python -m recipes.offline_rl.evaluate CHECKPOINT --env NAME --targets 3000,1000``.

Pass several checkpoints for trainings of one model with several seeds.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.command_parser import CommandParser
from common.files.output_files import check_new
from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.models.decision_hub_interface import FULL, DecisionHubInterface
from fairseq_plugin.tasks.offline_rl import read_context

from ..shared.architectures import option_prefix
from ..shared.json_files import write_json
from ..shared.scripts import command_line, positive_int, script
from ..shared.tables import Table, as_text, describe_run, spread
from ..shared.variants import additions_of
from .acting import Evaluation, evaluate, load
from .d4rl import robot_of, score, score_range
from .published import published


def table(described: EpisodeDescription, evaluations: Sequence[Evaluation], targets: Sequence[float]) -> Table:
    """The table: a row per target with returns, deviations over episodes and checkpoints, and normalised scores."""
    rows = []
    for target in targets:
        returns = [
            [episode.total for episode in evaluation.episodes if episode.target == target] for evaluation in evaluations
        ]
        means = [statistics.mean(checkpoint_returns) for checkpoint_returns in returns]
        all_returns = [episode_return for checkpoint_returns in returns for episode_return in checkpoint_returns]
        scores = [score(described, mean) for mean in means]
        rows.append(
            (
                f"{target:,.0f}",
                spread(all_returns, 0),
                spread(means, 0),
                spread(scores, 1),
                f"{min(all_returns):,.0f}",
                f"{max(all_returns):,.0f}",
                str(len(all_returns)),
            )
        )
    low, high = score_range(described)
    constants = "D4RL's constants" if robot_of(described.name) else "the data's own lowest and highest"
    notes = [
        f"score: 0 for a return of {low:,.1f}, 100 for {high:,.1f}, {constants}",
        f"trained on {described.name}: returns {described.lowest:,.0f} to {described.highest:,.0f}, "
        f"mean {described.average:,.0f}",
        f"an action took {statistics.mean(run.milliseconds for run in evaluations):.1f} ms, of all episodes side by "
        "side together",
    ]
    row = published(described.name)
    if row is not None:
        notes.append(f"the paper's row of scores: {row}")
    header = ("target", "return, over episodes", "over checkpoints", "score", "least", "most", "episodes")
    return Table("Returns", header, rows, notes)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.offline_rl.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="one for each seed")
    parser.add_argument(
        "--env", metavar="NAME", help="of gymnasium; default: the one of the training data, if it names no module"
    )
    parser.add_argument(
        "--targets",
        type=numbers,
        metavar="A,B",
        help="returns that are wanted, such as -500,-100; default: see README",
    )
    parser.add_argument("--episodes", type=positive_int, default=10, help="for each target (%(default)s)")
    parser.add_argument(
        "--context",
        metavar=f"K|{FULL}",
        help="steps that an action is computed from, anew for each; full: all of them, one step at a time from a "
        "state. Default: as in training",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first episode (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every episode, as JSON")
    return parser


def numbers(text: str) -> list[float]:
    """Option type: comma-separated numbers, without duplicates.

    Raises:
        argparse.ArgumentTypeError: one is not finite.
    """
    values = list(dict.fromkeys(float(part) for part in text.split(",")))
    if not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(f"{text}; allowed: finite numbers")
    return values


def named_environment(described: EpisodeDescription, path: Path) -> str:
    """The environment that the checkpoint ``path`` was trained for.

    Raises:
        ValueError: it names no environment, or one with a module, which gymnasium would import: the user must name it.
    """
    if not described.environment:
        raise ValueError(f"--env is not given, and {described.name} names none; allowed: a name of gymnasium")
    if ":" in described.environment:
        raise ValueError(
            f"--env is not given, and {path} names {described.environment!r}, for which a module is imported; allowed: "
            f"a name without one, or your word for it, --env {described.environment}"
        )
    return described.environment


def model_name(hub: DecisionHubInterface) -> str:
    """The architecture of a trained model with its additions, such as linear_decision+forget."""
    model = hub.cfg.model
    return model._name + additions_of(model, option_prefix(model._name))


def _common_name(paths: Sequence[Path], hubs: Sequence[DecisionHubInterface]) -> str:
    """The name that all models have; ValueError if they do not have the same."""
    names = [model_name(hub) for hub in hubs]
    for path, name in zip(paths, names):
        if name != names[0]:
            raise ValueError(f"{path} is {name}, and {paths[0]} is {names[0]}; allowed: trainings of one model")
    return names[0]


@script("evaluate")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    started = time.monotonic()
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}; allowed: at least 0")
    if options.output is not None:
        check_new(options.output, "--output")
    context = None if options.context is None else read_context("--context", options.context) or FULL
    hubs = [load(path) for path in options.checkpoints]
    description = hubs[0].described
    for path, hub in zip(options.checkpoints, hubs):
        if hub.described != description:
            raise ValueError(f"{path} was trained on other data than {options.checkpoints[0]}; allowed: the same data")
    model = _common_name(options.checkpoints, hubs)
    environment = options.env or named_environment(description, options.checkpoints[0])
    robot = robot_of(description.name)
    targets = options.targets or (list(robot.targets) if robot else [description.highest, description.average])
    evaluations = [evaluate(hub, environment, targets, options.episodes, options.seed, context) for hub in hubs]
    run = describe_run(command_line("recipes.offline_rl.evaluate", arguments), time.monotonic() - started)
    print(as_text([table(description, evaluations, targets)], run))
    if options.output is not None:
        episodes = {
            str(path): [episode._asdict() for episode in evaluation.episodes]
            for path, evaluation in zip(options.checkpoints, evaluations)
        }
        models = {str(path): model for path in options.checkpoints}
        content = {"run": run._asdict(), "data": description.as_dict(), "episodes": episodes, "models": models}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
