"""Columns by position, notes and the picture of ``recipes.long_contexts.lengths``: a panel for each model."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, ScalarFormatter

from ..positions import Bin, edges
from ..shared.comparison import Column, Results, by_model, of_model
from ..shared.experiment import Data, Record
from ..shared.plots import COLOURS, STYLE, save
from ..shared.tables import MISSING, spread
from ..shared.variants import variant_notes

#: Panels of the picture beside each other.
_ACROSS = 6
#: The highest perplexity that is drawn, in times the highest at the training length.
_HIGHEST = 2.5
_NOTES = {
    "cosformer": "its cosine spans the longest length, in training too",
    "daft_full": "its biases by pairs of positions are there for the longest length; the later ones learned nothing",
    "synthesizer": "its columns for positions are there for the longest length; the later ones learned nothing",
    "flash": "flash_lm, gated attention units, two of which are one layer",
}


def curve(records: Sequence[Record]) -> dict[tuple[int, int], list[float]]:
    """Perplexities over seeds, by the beginning and the end of the bin they are of."""
    perplexities: dict[tuple[int, int], list[float]] = {}
    for record in records:
        for part in (Bin(**content) for content in record["bins"]):
            perplexities.setdefault((part.begin, part.end), []).append(part.perplexity)
    return perplexities


def length_columns(options: Any) -> list[Column]:
    """A column for each bin that ends in the second half of the training length or later."""
    bounds, length = edges(options.tokens_per_sample, options.longest), options.tokens_per_sample

    def cell(begin: int, end: int) -> Callable[[Sequence[Record]], str]:
        return lambda records: spread(curve(records).get((begin, end), []))

    shown = [part for part in zip(bounds, bounds[1:]) if part[1] >= length // 2]
    return [Column(f"{begin:,} to {end:,}", cell(begin, end)) for begin, end in shown]


def change_column(options: Any) -> Column:
    """The last perplexity over that of the last bin of the training length, as a change in per cent."""

    def cell(records: Sequence[Record]) -> str:
        values = curve(records)
        trained = [values[part] for part in values if part[1] == options.tokens_per_sample]
        if not trained:
            return MISSING
        last = values[max(values)]
        return f"{100 * (statistics.mean(last) / statistics.mean(trained[0]) - 1):+,.0f} %"

    return Column("change", cell)


def best_first(models: Sequence[str], records: Sequence[Record]) -> list[str]:
    """The models, the best at the last positions first, those without a result last."""

    def last(name: str) -> float:
        values = curve(of_model(records, name))
        return statistics.mean(values[max(values)]) if values else math.inf

    return sorted(models, key=last)


def refusals(options: Any, data: Data, compared: Results) -> Record:
    """The fact ``refused``: why models cannot read longer inputs, by model and seed."""
    refused = {f"{record['model']}.{record['seed']}": record["refused"] for record in compared.outcomes}
    return {"refused": {name: reason for name, reason in refused.items() if reason}}


def notes(options: Any, facts: Record) -> list[str]:
    """Notes below the table."""
    length = options.tokens_per_sample
    tokens = ", ".join(f"{count:,} {split}" for split, count in facts["tokens"].items())
    own = [f"{name}: {note}" for name, note in _NOTES.items() if name in options.models]
    return [
        f"perplexity of the test text ({facts['unit']}) by how many tokens of its window were read before a token; "
        f"{facts['windows']:,} windows of {options.longest:,} tokens, one every {length:,}, so that each column from "
        f"{length:,} on is of the same text; tokens: {tokens}",
        "change: from the last column of the training length to the last one; best models first",
        f"{options.updates:,} updates of {options.batch_tokens:,} tokens in sequences of {length:,}, {options.layers} "
        f"layers of width {options.width}, {options.heads} heads, highest learning rate {options.lr:g} for all; "
        f"windows and chunks of mechanisms are {max(1, length // 4)} tokens; models of all but +no_positions have "
        "sinusoidal positions",
        *variant_notes(options.models),
        *own,
        *(f"{name} cannot read longer inputs: {reason}" for name, reason in facts.get("refused", {}).items()),
    ]


def draw(options: Any, facts: Record, records: Sequence[Record], path: Path) -> None:
    """A panel for each model that can read longer inputs: its perplexity by position, over those of all in grey.

    Nothing is drawn if no model can.
    """
    length, models = options.tokens_per_sample, best_first(options.models, records)
    curves = {name: values for name, of in by_model(records, models).items() if (values := curve(of))}
    if not curves:
        return
    models = list(curves)
    means = {name: {part: statistics.mean(of) for part, of in found.items()} for name, found in curves.items()}
    everything = [value for found in means.values() for value in found.values()]
    trained = [value for found in means.values() for part, value in found.items() if part[1] == length]
    across = min(_ACROSS, len(models))
    down = -(-len(models) // across)
    with plt.rc_context(STYLE):
        size = {"figsize": (2.3 * across, 2.0 * down + 0.6)}
        figure, grid = plt.subplots(down, across, sharex=True, sharey=True, squeeze=False, layout="constrained", **size)
        for axes, name in zip(grid.flat, models):
            for other, found in means.items():
                if other != name:
                    _line(axes, found, color="0.85", linewidth=0.8)
            last = means[name][max(means[name])]
            _line(axes, means[name], color=COLOURS[0 if last > _at(means[name], length) * 1.05 else 1], linewidth=2)
            axes.axvline(length, color="0.4", linestyle=":", linewidth=1)
            axes.set_title(f"{name}\n{_at(means[name], length):.2f} → {last:,.2f}", fontsize=9)
        for axes in list(grid.flat)[len(models) :]:
            axes.set_visible(False)
        longest = max(end for found in means.values() for _, end in found)
        _scales(grid[0, 0], length, longest, min(everything), min(max(everything), _HIGHEST * max(trained)))
        figure.supxlabel(f"tokens of the window before; dotted: the length of training, {length:,}", fontsize=10)
        figure.supylabel("perplexity of the test text", fontsize=10)
        save(figure, path, dpi=130)


def _at(found: dict[tuple[int, int], float], length: int) -> float:
    """The value of the last bin that lies within the length of training."""
    return next(value for part, value in found.items() if part[1] == length)


def _line(axes: Axes, found: dict[tuple[int, int], float], **style) -> None:
    """Each bin at the middle of its positions, on a logarithmic axis."""
    parts = sorted(found)
    axes.plot([math.sqrt(max(1, begin) * end) for begin, end in parts], [found[part] for part in parts], **style)


def _scales(axes: Axes, length: int, longest: int, lowest: float, highest: float) -> None:
    """Both axes logarithmic, with few plain numbers; all panels share them."""
    axes.set(xscale="log", yscale="log", ylim=(0.95 * lowest, 1.05 * highest))
    ticks = [max(1, length // 8), length, longest]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
