"""The scores of several data sets in one table, with their average, as Table 7 of the Flowformer paper.

``python -m recipes.offline_rl.averages FILE...`` from the checkout's root, of files that ``evaluate --output`` wrote,
and of results.json of ``compare``.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.command_parser import CommandParser
from common.json_files import typed
from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.data.stored_arrays import described_by

from ..shared.json_files import read_json
from ..shared.scripts import script
from ..shared.summaries import summarise
from ..shared.tables import MISSING, Table, spread
from .acting import Played
from .d4rl import score

COMMAND = "recipes.offline_rl.averages"
SUFFIX = "_decision"
#: Model -> data set -> the score of each training.
Scores = dict[str, dict[str, list[float]]]


def gathered(paths: Sequence[Path]) -> Scores:
    """The score of every training for the highest target that it was given; of bc and awac any target is the same.

    Raises:
        ValueError: a file that is none of these, or one given twice, whose trainings would count as further ones.
    """
    found: Scores = defaultdict(lambda: defaultdict(list))
    read: set[Path] = set()
    for path in paths:
        if path.resolve() in read:
            raise ValueError(f"{path} is given twice; allowed: each file once")
        read.add(path.resolve())
        described, played = _read(path)
        for name, episodes in played:
            highest = max(one.target for one in episodes)
            mean = statistics.mean(one.total for one in episodes if one.target == highest)
            found[name.removesuffix(SUFFIX)][described.name].append(score(described, mean))
    return found


def _read(path: Path) -> tuple[EpisodeDescription, list[tuple[str, list[Played]]]]:
    """The description of the data in a file, and the episodes that were played, by the names of models."""
    allowed = "a file of recipes.offline_rl.evaluate --output, or results.json of recipes.offline_rl.compare"
    found = read_json(path, allowed, data=dict)
    described = described_by(EpisodeDescription, found["data"], f"{path}: data")
    if "results" in found:
        results = read_json(path, allowed, results=list[dict[str, Any]])["results"]
        named = [(one.get("model"), one.get("episodes")) for one in results]
    else:
        found = read_json(path, allowed, models=dict[str, str], episodes=dict)
        named = [(found["models"].get(at), episodes) for at, episodes in found["episodes"].items()]
    try:
        played = [(typed(name, str, "a name"), typed(episodes, list[Played], "episodes")) for name, episodes in named]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; allowed: {allowed}") from error
    if not all(episodes for _, episodes in played):
        raise ValueError(f"{path} has a model without an episode; allowed: {allowed}")
    return described, played


def table(scores: Scores) -> Table:
    """A row for each data set, a column for each model: mean and deviation over trainings; averages of both."""
    datasets = list(dict.fromkeys(dataset for ours in scores.values() for dataset in ours))
    rows = [(dataset, *(spread(ours[dataset], 1) for ours in scores.values())) for dataset in datasets]
    rows.append(("average", *(_average(ours, datasets) for ours in scores.values())))
    notes = [
        "scores: 0 and 100 are D4RL's constants for its own sets, and the least and the best return of other data",
        "for the highest target of each training; averages of means and of deviations where a model has all data sets",
    ]
    return Table("Scores", ("data", *(f"{name}{SUFFIX}" for name in scores)), rows, notes)


def _average(ours: dict[str, list[float]], datasets: Sequence[str]) -> str:
    if not all(ours[dataset] for dataset in datasets):
        return MISSING
    mean = statistics.mean(statistics.mean(ours[dataset]) for dataset in datasets)
    if any(len(ours[dataset]) < 2 for dataset in datasets):
        return f"{mean:.1f}"
    return f"{mean:.1f} ± {statistics.mean(statistics.stdev(ours[dataset]) for dataset in datasets):.1f}"


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON", help="of evaluate --output, or of compare")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table, as Markdown")
    return parser


@script("averages")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    summarise(COMMAND, arguments, options.out, lambda: [table(gathered(options.files))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
