"""Perplexity by position up to several times the training length, of every causal architecture, in one picture.

``python -m recipes.long_contexts.lengths --file FILE`` trains them with one budget; ``--runs FOLDER`` takes what
``recipes.compare_text`` trained. Run it again, and it goes on.
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from .. import models, runs
from ..models import NO_POSITIONS
from ..positions import edges
from ..runs import Run, spread

#: FLASH's gated attention units, which are no mechanism of Transformer layers; two units are one layer.
FLASH = "flash"
#: Positions are sinusoids that no model has seen beyond its training length; these do without.
_WITHOUT_POSITIONS = ("softmax", "local", "linear+forget", "flow+forget", "retention", "gla", "gated_delta", FLASH)
_ACROSS = 6  # panels of the picture beside each other


def default_names() -> list[str]:
    """Every causal mechanism, FLASH, additions of ours, and some models without positions."""
    plain = [name for name in models.names() if "+" not in name]
    added = ["linear+forget", "flow+forget", "flow+short_conv"]
    return [*plain, FLASH, *added, *(name + NO_POSITIONS for name in _WITHOUT_POSITIONS)]


def model_arguments(options, name: str) -> list[object]:
    """The arguments of fairseq-train that define a model, which is built for the longest windows."""
    longest = ["--max-target-positions", options.times * options.tokens_per_sample]
    if models.mechanism_of(name) != FLASH:
        return [*models.model_arguments(options, name), *longest]
    made = models.model_arguments(options, name.replace(FLASH, "linear"))  # the last of an option counts
    made += ["--arch", "flash_lm", "--flash-chunk-size", max(1, options.tokens_per_sample // 4)]
    return [*made, *longest, "--decoder-layers", 2 * options.layers, "--decoder-ffn-embed-dim", 2 * options.width]


def measurement(options, data: Path, checkpoint: object) -> list[object]:
    """The command that measures a model."""
    length = options.tokens_per_sample
    sizes = ["--length", length, "--longest", options.times * length, "--windows", options.windows]
    return ["-m", "recipes.positions", checkpoint, "--data", data, *sizes]


def read(folder: Path) -> dict:
    """The perplexity of each bin, and why the model could not read so far, if so."""
    then = folder / "then.log"
    log = then if then.exists() else folder / "train.log"
    return json.loads(log.read_text(encoding="utf-8").strip().splitlines()[-1])


def table(found: pd.DataFrame, length: int, longest: int) -> pd.DataFrame:
    """Perplexity by position from half of the training length on, the best at the last positions first."""
    bins = pd.DataFrame(list(found.perplexities), index=found.index)
    ends = edges(length, longest)[1:]
    shown = [name for name, end in zip(bins, ends) if end >= length // 2]
    means = bins.groupby(found.model, sort=False).mean()
    columns = {name: (name, lambda x: spread(2)(x) if x.notna().all() else "-") for name in shown}
    columns = {"parameters": ("parameters", "first"), **columns, "seeds": ("seed", "count")}
    made = runs.table(pd.concat([found[["model", "seed", "parameters"]], bins], axis=1), columns).set_index("model")
    if shown:
        trained = means[list(bins)[ends.index(length)]]
        change = (100 * (means[shown[-1]] / trained - 1)).map("{:+,.0f} %".format)
        made.insert(len(shown) + 1, "change", change.where(means[shown[-1]].notna(), "-"))
        made = made.loc[means[shown[-1]].sort_values(na_position="last").index]
    made["parameters"] = made["parameters"].map("{:,}".format)
    return made.reset_index()


def draw(found: pd.DataFrame, order: Sequence[str], length: int, longest: int, path: Path) -> None:
    """A panel for each model that can read longer inputs: its perplexity by position, over those of all in grey."""
    readers = found[found.refused.isna()]
    if readers.empty:
        return
    bounds = edges(length, longest)
    middles = [math.sqrt(max(1, begin) * end) for begin, end in itertools.pairwise(bounds)]
    means = {
        name: pd.DataFrame(list(rows.perplexities)).mean().to_numpy()
        for name, rows in readers.groupby("model", sort=False)
    }
    names, last = [name for name in order if name in means], bounds.index(length) - 1
    every, across = np.stack(list(means.values())), min(_ACROSS, len(names))
    down = -(-len(names) // across)
    size = {"figsize": (2.3 * across, 2.0 * down + 0.6)}
    figure, grid = plt.subplots(down, across, sharex=True, sharey=True, squeeze=False, layout="constrained", **size)
    for axes, name in itertools.zip_longest(grid.flat, names):
        if name is None:
            axes.set_visible(False)
            continue
        axes.plot(middles, every.T, color="0.85", linewidth=0.8)
        worse = means[name][-1] > 1.05 * means[name][last]
        axes.plot(middles, means[name], color="C1" if worse else "C0", linewidth=2)
        axes.axvline(length, color="0.4", linestyle=":", linewidth=1)
        axes.set_title(f"{name}\n{means[name][last]:.2f} → {means[name][-1]:,.2f}", fontsize=9)
    axes = grid[0, 0]
    highest = min(every.max(), 2.5 * every[:, last].max())
    axes.set(xscale="log", yscale="log", ylim=(0.95 * every.min(), 1.05 * highest))
    ticks = [max(1, length // 8), length, longest]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    figure.supxlabel(f"tokens of the window before; dotted: the length of training, {length:,}", fontsize=10)
    figure.supylabel("perplexity of the test text", fontsize=10)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train or find the models, measure, print and draw."""
    parser = models.parser(__doc__.splitlines()[0], "work/long_contexts/lengths", default_names(), updates=300, seeds=1)
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="the --out of recipes.compare_text, not --file")
    parser.add_argument("--times", type=int, default=8, help="windows, in training lengths, from 2")
    parser.add_argument("--windows", type=int, default=200, help="of the test text, at most")
    options = models.parsed(parser, arguments, [*models.all_names(), FLASH, FLASH + NO_POSITIONS])
    if (options.file is None) == (options.runs is None) or options.times < 2:
        parser.error("--file and --runs are both given, or neither, or --times is below 2; allowed: one, and from 2")
    if options.quick and not options.runs:
        options.tokens_per_sample, options.times = min(32, options.tokens_per_sample), 2
    length, unit, counts = options.tokens_per_sample, "as trained", {}
    longest = options.times * length
    if options.runs:
        done = sorted(path.parent for path in options.runs.glob("runs/*/done.json"))
        if not done:
            parser.error(f"--runs is {options.runs}, in which no training is complete; allowed: where some are")
        runs.begin(options.out, ["recipes.long_contexts.lengths", options.runs.absolute()])
        planned = []
        for folder in done:
            name, seed = folder.name.rsplit(".", 1)
            command = measurement(options, options.runs / "data-bin", folder / "checkpoints" / "checkpoint_best.pt")
            planned.append(Run(name, int(seed), command, (), False))
    else:
        data, counts, unit = models.text(options)
        planned = [
            Run(
                name,
                seed,
                models.command(options, data, model_arguments(options, name), seed, evaluations=2),
                measurement(options, data, "{folder}/checkpoints/checkpoint_best.pt"),
            )
            for seed, name in itertools.product(range(1, options.seeds + 1), options.models)
        ]
    found = runs.train_all(planned, options.out, options.jobs, read)
    trained = (options.runs or options.out) / "runs"
    found["parameters"] = [runs.parameters(trained / f"{x.model}.{x.seed}" / "train.log") for x in found.itertuples()]
    tokens = "".join(f", {count:,} {split}" for split, count in counts.items())
    budget = (
        f"{options.updates:,} updates of {options.batch_tokens:,} tokens in sequences of {length:,}, {options.layers} "
        f"layers of width {options.width}, {options.heads} heads, highest rate {options.lr:g} for all; windows "
        f"and chunks of mechanisms are {max(1, length // 4)} tokens"
    )
    refused = found.dropna(subset="refused")
    notes = [
        f"perplexity of the test text ({unit}{tokens}) by how many tokens of its window were read before a token; "
        f"{found.windows.iloc[0]:,} windows of {longest:,} tokens, one every {length:,}, so that each "
        f"column from {length:,} on is of the same text",
        "change: from the last column of the training length to the last one; best models first; models of all but "
        "+no_positions have sinusoidal positions",
        *([] if options.runs else [budget]),
        *models.notes(found.model),
        *(f"{x.model}.{x.seed} cannot read longer inputs: {x.refused}" for x in refused.itertuples()),
    ]
    shown = table(found, length, longest)
    title = f"Perplexity by position, models trained on sequences of {length:,}"
    runs.report(options.out, {title: shown}, notes, found)
    draw(found, list(shown.model), length, longest, options.out / "results.png")


if __name__ == "__main__":
    main()
