"""The scores on several data sets and their average in one table, as in Table 7 of the Flowformer paper.

Run ``python -m recipes.offline_rl.averages FILE...`` from the checkout's root, with files that ``evaluate --output``
wrote, or results.json of ``compare``.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.command_parser import CommandParser
from common.files.json_files import typed
from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.data.stored_arrays import described_by

from ..shared.architectures import with_suffix, without_suffix
from ..shared.json_files import read_json
from ..shared.scripts import script
from ..shared.summaries import summarise
from ..shared.tables import MISSING, Table, spread
from .acting import Played
from .d4rl import score

COMMAND = "recipes.offline_rl.averages"
SUFFIX = "_decision"
#: Model -> data set -> one score per training.
Scores = dict[str, dict[str, list[float]]]


def gathered(paths: Sequence[Path]) -> Scores:
    """Read the score of every training for its highest target; bc and awac ignore the target.

    Raises:
        ValueError: a file has the wrong format, is passed twice, so that its trainings would count twice, or has other
            data with the name of an earlier file's.
    """
    scores: Scores = defaultdict(lambda: defaultdict(list))
    paths_read: set[Path] = set()
    data: dict[str, EpisodeDescription] = {}
    for path in paths:
        if path.resolve() in paths_read:
            raise ValueError(f"{path} is given twice; allowed: each file once")
        paths_read.add(path.resolve())
        description, played = _read(path)
        if data.setdefault(description.name, description) != description:
            raise ValueError(f"{path} is of other data than a file before it; allowed as {description.name}: the same")
        for name, episodes in played:
            highest = max(episode.target for episode in episodes)
            mean = statistics.mean(episode.total for episode in episodes if episode.target == highest)
            scores[without_suffix(name, SUFFIX)][description.name].append(score(description, mean))
    return scores


def _read(path: Path) -> tuple[EpisodeDescription, list[tuple[str, list[Played]]]]:
    """The data description in a file, and pairs of a model's name and its episodes."""
    allowed = "a file of recipes.offline_rl.evaluate --output, or results.json of recipes.offline_rl.compare"
    content = read_json(path, allowed, data=dict)
    description = described_by(EpisodeDescription, content["data"], f"{path}: data")
    if "results" in content:
        results = read_json(path, allowed, results=list[dict[str, Any]])["results"]
        named = [(record.get("model"), record.get("episodes")) for record in results]
    else:
        content = read_json(path, allowed, models=dict[str, str], episodes=dict)
        named = [
            (content["models"].get(path_of_model), episodes) for path_of_model, episodes in content["episodes"].items()
        ]
    try:
        played = [(typed(name, str, "a name"), typed(episodes, list[Played], "episodes")) for name, episodes in named]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; allowed: {allowed}") from error
    if not all(episodes for _, episodes in played):
        raise ValueError(f"{path} has a model without an episode; allowed: {allowed}")
    return description, played


def table(scores: Scores) -> Table:
    """The table: a row per data set, a column per model, with mean and deviation over trainings, and their averages."""
    datasets = list(dict.fromkeys(dataset for model_scores in scores.values() for dataset in model_scores))
    rows = [(dataset, *(spread(model_scores[dataset], 1) for model_scores in scores.values())) for dataset in datasets]
    rows.append(("average", *(_average(model_scores, datasets) for model_scores in scores.values())))
    notes = [
        "scores: 0 and 100 are D4RL's constants for its own sets, and the least and the best return of other data",
        "for the highest target of each training; averages of means and of deviations where a model has all data sets",
    ]
    return Table("Scores", ("data", *(with_suffix(name, SUFFIX) for name in scores)), rows, notes)


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
