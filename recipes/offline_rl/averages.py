"""The scores of several data sets in one table, with their average, as Table 7 of the Flowformer paper.

``python -m recipes.offline_rl.averages FILE...`` from the checkout's root, of files that ``evaluate --output`` wrote,
and of results.json of ``compare``.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq_plugin.data.episode_folder import EpisodeDescription

from ..shared.scripts import script
from ..shared.summaries import summarise
from ..shared.tables import MISSING, Table, spread
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
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            described = EpisodeDescription(**content["data"])
            if "results" in content:
                played = [(one["name"], one["episodes"]) for one in content["results"]]
            else:
                played = [(content["models"][at], episodes) for at, episodes in content["episodes"].items()]
            for name, episodes in played:
                highest = max(one["target"] for one in episodes)
                mean = statistics.mean(one["total"] for one in episodes if one["target"] == highest)
                found[name.removesuffix(SUFFIX)][described.name].append(score(described, mean))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            allowed = "a file of recipes.offline_rl.evaluate --output, or results.json of recipes.offline_rl.compare"
            raise ValueError(f"{path}: {error}; allowed: {allowed}") from None
    return found


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


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
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
