"""Tables and panels of how far back the teacher and its forms read, untrained and after stage 2; see ``reach``.

A record may have ``reach``: by stage, the per cent ``found`` at each distance and the ``bins`` of losses by position.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ..long_contexts.lengths_report import change_column, curve, length_columns
from ..shared.comparison import MODEL, SEEDS, Column, Results, of_model, table
from ..shared.experiment import Record
from ..shared.plots import STEPS, legend_beside, logarithmic, style_of
from ..shared.tables import Table, spread
from .stages import DISTILLED, EXCHANGED, TEACHER

#: Stages that are measured -> what a row of the stage is called after the name of the model.
_STAGES = {TEACHER: "", EXCHANGED: ", untrained", DISTILLED: ", trained"}


def by_stage(records: Sequence[Record]) -> list[Record]:
    """The reach of each record and stage, as records of models such as "local, untrained"."""
    return [
        {"model": record["model"] + _STAGES[stage], "seed": record["seed"], **reach}
        for record in records
        for stage, reach in record.get("reach", {}).items()
    ]


def reach_tables(options: Any, facts: Record, records: Sequence[Record]) -> list[Table]:
    """Needles by distance, and perplexity by position; none if no record has them."""
    measured = by_stage(records)
    models = [
        name + word
        for name in (TEACHER, *options.models)
        for word in _STAGES.values()
        if of_model(measured, name + word)
    ]
    if not measured:
        return []
    results = Results(measured, {})
    found = [Column(f"{distance:,}", _found(i)) for i, distance in enumerate(facts["distances"])]
    needles, lengths = (
        table("Needles by distance", [MODEL, *found, SEEDS], models, results, _needle_notes(options, facts)),
        table(
            "Perplexity by position",
            [MODEL, *length_columns(options), change_column(options), SEEDS],
            models,
            results,
            _length_notes(options, facts),
        ),
    )
    return [needles, lengths]


def draw_found(axes: Axes, options: Any, facts: Record, forms: dict[str, Sequence[Record]], teachers: Sequence) -> None:
    """Per cent of needles by distance: thick after stage 2, thin untrained."""

    def points(measured: Sequence[Record]) -> list[tuple[float, float]]:
        means = [statistics.mean(values) for values in zip(*(record["found"] for record in measured))]
        return list(zip(facts["distances"], means))

    _draw_lines(axes, forms, teachers, points)
    axes.set_xlabel("tokens from one marker to the other")
    axes.set_ylim(-3, 103)


def draw_lengths(
    axes: Axes, options: Any, facts: Record, forms: dict[str, Sequence[Record]], teachers: Sequence
) -> None:
    """Perplexity by position, each bin at its end: thick after stage 2, thin untrained."""

    def points(measured: Sequence[Record]) -> list[tuple[float, float]]:
        return [(end, statistics.mean(values)) for (_, end), values in sorted(curve(measured).items())]

    _draw_lines(axes, forms, teachers, points)
    length = options.tokens_per_sample
    ends = [length >> 3, *(length << i for i in range(options.times.bit_length()))]
    logarithmic(axes, [end for end in ends if end <= options.longest])
    axes.yaxis.set_major_locator(LogLocator(subs=STEPS))
    axes.axvline(length, color="0.4", linestyle=":", linewidth=1)
    axes.set_xlabel(f"tokens before, up to; dotted: the length of training, {length:,}")


def _draw_lines(axes: Axes, forms: dict[str, Sequence[Record]], teachers: Sequence, points: Callable) -> None:
    """A line for the teacher, and two of the same look for each form."""
    if reach := by_stage(teachers):
        axes.plot(*zip(*points(reach)), color="0.5", linestyle="--", label=TEACHER)
    for i, (name, records) in enumerate(forms.items()):
        style = style_of(i)
        for stage, width in ((DISTILLED, 1.8), (EXCHANGED, 0.7)):
            measured = points(of_model(by_stage(records), name + _STAGES[stage]))
            label = name if stage == DISTILLED else None
            if measured:
                axes.plot(
                    *zip(*measured), marker=style.marker, linewidth=width, label=label, markersize=3, **style.line
                )
    axes.grid(alpha=0.25)
    legend_beside(axes)


def _found(place: int) -> Callable[[Sequence[Record]], str]:
    return lambda records: spread([record["found"][place] for record in records], 0)


def _needle_notes(options: Any, facts: Record) -> list[str]:
    learned = f"{options.needles} copies of a needle of its own" if options.needles else "no needle"
    return [
        "per cent of needles that are found, by the number of tokens from one marker to the other, in sequences of "
        f"{options.tokens_per_sample:,} tokens of the test text; a needle is a marker, the rarest symbol of the text, "
        f"and one of the {facts['choices']} next rarest, which the model must write after the second marker: guessing "
        f"finds {100 / facts['choices']:.1f}; every sequence of the trainings has {learned}",
        "untrained: the teacher's weights under another attention; trained: after stage 2",
    ]


def _length_notes(options: Any, facts: Record) -> list[str]:
    return [
        "perplexity of the test text by how many tokens of its window were read before a token; "
        f"{facts['windows']:,} windows of {options.longest:,} tokens, one every {options.tokens_per_sample:,}, so that "
        f"each column from {options.tokens_per_sample:,} on is of the same text; trained on sequences of "
        f"{options.tokens_per_sample:,}, whose sinusoids go on",
        "change: from the last column of the training length to the last one",
        *_without_lengths(options),
    ]


def _without_lengths(options: Any) -> Iterator[str]:
    if any("cosformer" in options.form(name).kinds for name in options.models):
        yield "cosformer is not measured: its cosine spans the longest length, so for longer ones it is another formula"
