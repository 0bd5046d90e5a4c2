"""The results of ``recipes.long_contexts.lengths``: a table, JSON, and a picture with a panel for each model."""

import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, ScalarFormatter
from torch import Tensor

from ..shared.comparison import MODEL, PARAMETERS, SEEDS, Budget, Column, Compared, Report, by_model, of_model, table
from ..shared.plots import COLOURS, STYLE, save
from ..shared.tables import MISSING, spread
from .positions import Bin

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


class Measured(NamedTuple):
    """One trained model on windows longer than it was trained on."""

    model: str
    seed: int
    parameters: int
    bins: list[Bin]  # by position, none where it cannot read so many tokens
    refused: str | None  # why
    seconds: float  # of its training


def curve(measured: Sequence[Measured]) -> dict[tuple[int, int], list[float]]:
    """Perplexities over seeds, by the bin they are of."""
    found: dict[tuple[int, int], list[float]] = {}
    for one in measured:
        for part in one.bins:
            found.setdefault((part.begin, part.end), []).append(part.perplexity)
    return found


def _column(begin: int, end: int) -> Column:
    def cell(ours: Sequence[Measured]) -> str:
        return spread(curve(ours).get((begin, end), []))

    return Column(f"{begin:,} to {end:,}", cell)


def _growth(length: int, ours: Sequence[Measured]) -> str:
    """The last perplexity over that of the last bin of the training length, as a change in per cent."""
    values = curve(ours)
    trained = [values[part] for part in values if part[1] == length]
    if not trained:
        return MISSING
    last = values[max(values)]
    return f"{100 * (statistics.mean(last) / statistics.mean(trained[0]) - 1):+,.0f} %"


def _sorted_models(measured: Sequence[Measured], models: Sequence[str]) -> list[str]:
    """The models, the best at the last positions first, those without a result last."""

    def last(name: str) -> float:
        values = curve(of_model(measured, name))
        return statistics.mean(values[max(values)]) if values else math.inf

    return sorted(models, key=last)


def report(plan: Budget, tokens: dict[str, int], unit: str, windows: Tensor, compared: Compared) -> Report:
    """A table with a row for each model, and a picture. ``unit`` is what a token is."""
    measured, length = compared.outcomes, plan.tokens_per_sample
    parts = sorted({(part.begin, part.end) for one in measured for part in one.bins})
    shown = [_column(*part) for part in parts if part[1] >= length // 2]
    change = Column("change", functools.partial(_growth, length))
    models = _sorted_models(measured, plan.models)
    notes = _notes(plan, tokens, unit, windows, measured)
    content = {
        "plan": plan.as_dict(),
        "tokens": tokens,
        "unit": unit,
        "results": [{**one._asdict(), "bins": [part._asdict() for part in one.bins]} for one in measured],
        "failed": compared.failed,
    }
    title = f"Perplexity by position, models trained on sequences of {length:,}"
    columns = [MODEL, PARAMETERS, *shown, change, SEEDS]
    drawing = functools.partial(draw, length, [name for name in models if curve(of_model(measured, name))], measured)
    return Report([table(title, columns, models, compared, notes)], content, drawing if parts else None)


def _notes(plan: Budget, tokens: dict[str, int], unit: str, windows: Tensor, measured: Sequence[Measured]) -> list[str]:
    length, longest = plan.tokens_per_sample, plan.longest
    refusals = [f"{one.model}.{one.seed} cannot read longer inputs: {one.refused}" for one in measured if one.refused]
    own = [f"{name}: {note}" for name, note in _NOTES.items() if name in plan.models]
    return [
        f"perplexity of the test text ({unit}) by how many tokens of its window were read before a token; "
        f"{len(windows):,} windows of {longest:,} tokens, one every {length:,}, so that each column from {length:,} on "
        f"is of the same text; tokens: {', '.join(f'{count:,} {split}' for split, count in tokens.items())}",
        "change: from the last column of the training length to the last one; best models first",
        f"{plan.updates:,} updates of {plan.batch_tokens:,} tokens in sequences of {length:,}, {plan.layers} layers of "
        f"width {plan.width}, {plan.heads} heads, highest learning rate {plan.lr:g} for all; windows and chunks of "
        f"mechanisms are {max(1, length // 4)} tokens; models of all but +no_positions have sinusoidal positions",
        *plan.notes(),
        *own,
        *([f"further arguments of fairseq-train: {' '.join(plan.more)}"] if plan.more else []),
        *refusals,
    ]


def draw(length: int, models: Sequence[str], measured: Sequence[Measured], path: Path) -> None:
    """A panel for each of ``models``: its perplexity by position, over those of all others in grey."""
    curves = {name: curve(ours) for name, ours in by_model(measured, models).items()}
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


def _line(axes: Axes, found: dict[tuple[int, int], float], **look) -> None:
    """Each bin at the middle of its positions, on a logarithmic axis."""
    parts = sorted(found)
    axes.plot([math.sqrt(max(1, begin) * end) for begin, end in parts], [found[part] for part in parts], **look)


def _scales(axes: Axes, length: int, longest: int, lowest: float, highest: float) -> None:
    """Both axes logarithmic, with few plain numbers; all panels share them."""
    axes.set(xscale="log", yscale="log", ylim=(0.95 * lowest, 1.05 * highest))
    ticks = [max(1, length // 8), length, longest]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
