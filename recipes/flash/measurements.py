"""The records of a comparison, as tables by length, with notes on those that are missing; ``report`` draws them.

A record is of a model at a ``length`` with a seed; ``curve`` has updates, and the perplexity of the valid split then.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..shared.comparison import Column, Results, by_length, of_model, table
from ..shared.experiment import Data, Record, largest, mean
from ..shared.tables import MISSING, Table, break_even, spread
from .models import ALL_MODELS, masked_name

FUSED = "transformer_pp_lm"
#: Table 5: a model, and the same with mixed chunk attention.
_CHANGES = (("flash_quad_lm", "flash_lm"), ("transformer_pp_lm", "mc_transformer_pp_lm"))


class Comparison(NamedTuple):
    """The records of an experiment, and its options."""

    options: Any
    records: Sequence[Record]
    steps: Sequence[Record] = ()  # models in turns, from ``--steps``

    def spelled(self, name: str) -> str:
        """The causal model ``name``, or the masked one in its place where models are masked."""
        return masked_name(name) if self.options.masked else name

    def seconds_per_step(self, architecture: str, length: int) -> float | None:
        """The median over runs in turns or, where there are none, over trainings; None without either."""
        steps = [step for step in of_model(self.steps, architecture) if step["length"] == length]
        speeds = [record["tokens_per_second"] for record in steps or self.of(architecture, length)]
        return self.options.tokens_per_update / statistics.median(speeds) if speeds else None

    def of(self, architecture: str, length: int) -> list[Record]:
        """The records of one model at one length, one for each seed."""
        return [record for record in of_model(self.records, architecture) if record["length"] == length]

    def curve(self, architecture: str, length: int) -> list[tuple[float, float]]:
        """Seconds of training without evaluations, and the mean perplexity of all seeds then."""
        step, records = self.seconds_per_step(architecture, length), self.of(architecture, length)
        points = zip(*(record["curve"] for record in records))
        return [(at[0][0] * step, statistics.mean(point[1] for point in at)) for at in points]


def not_measured(options: Any, data: Data, compared: Results) -> Record:
    """The fact ``not_measured``: model, length and seed of what has no record, and the ``reason`` if it is known."""
    done = {(record["model"], record["length"], record["seed"]) for record in compared.outcomes}
    cases = [
        {"model": model, "length": length, "seed": seed, "reason": compared.failed.get(f"{model}.{length}.{seed}")}
        for seed in range(1, options.seeds + 1)
        for length in options.lengths
        for model in options.models
        if (model, length, seed) not in done
    ]
    return {"not_measured": cases}


TITLE = Column("model", known=lambda name: ALL_MODELS[name].title)
ATTENTION = Column("attention", known=lambda name: ALL_MODELS[name].attention)


def perplexity_columns(options: Any, facts: Record) -> list[Column]:
    """The columns of the first table."""
    return [
        TITLE,
        Column("architecture", known=lambda name: ALL_MODELS[name].architecture),
        Column("parameters", _parameters),
        *by_length(options.lengths, mean("perplexity")),
    ]


def perplexity_notes(options: Any, facts: Record) -> list[str]:
    """Notes below the first table."""
    valid = facts["text"]["valid"]
    of = f"of the valid split, {valid['tokens']:,} subwords of a vocabulary of {options.vocabulary:,}"
    if options.masked:
        notes = [f"{of}: of the 15 % that are masked"]
    else:
        notes = [f"{of}; to the power of {valid['tokens_per_word']:.4f} it is perplexity per word"]
    seeds = "one run, one seed" if options.seeds == 1 else f"mean and standard deviation of {options.seeds} seeds"
    return [*notes, f"after {options.updates} updates of {options.tokens_per_update:,} tokens each; {seeds}"]


def extra_tables(options: Any, facts: Record, records: list[Record]) -> list[Table]:
    """Seconds and memory, a row for each model and a column for each length; and what follows of them."""
    comparison = Comparison(options, records, facts.get("steps", ()))
    tables = [_seconds(comparison), _memory(comparison, facts), _ratios(comparison)]
    tables += [_added_perplexity(comparison), _speedup(comparison)]
    return [made for made in tables if made is not None]


def _table(comparison: Comparison, title: str, columns: list[Column], notes: list[str]) -> Table:
    return table(title, columns, comparison.options.models, Results(list(comparison.records), {}), notes)


def _seconds(comparison: Comparison) -> Table:
    per_update = comparison.options.tokens_per_update

    def cell(records: list[Record]) -> str:
        return f"{comparison.seconds_per_step(records[0]['model'], records[0]['length']):.3f}"

    columns = by_length(comparison.options.lengths, cell)
    notes = [_source_of_seconds(comparison)]
    title = f"Seconds per training step of {per_update:,} tokens"
    return _table(comparison, title, [TITLE, ATTENTION, *columns], [*notes, *_break_even_notes(comparison)])


def _source_of_seconds(comparison: Comparison) -> str:
    """A note."""
    if comparison.steps:
        return "loss and gradients, without an update, of recipes.flash.speed: models in turns, for as many tokens"
    per_update = comparison.options.tokens_per_update
    return f"{per_update:,} over the median of the tokens per second in fairseq's log, with whatever else ran"


def _memory(comparison: Comparison, facts: Record) -> Table:
    columns = by_length(comparison.options.lengths, largest("peak_bytes", 2**-20))
    notes = ["the whole process, Python and torch included", *_missing_notes(comparison.options, facts)]
    return _table(comparison, "Peak memory of fairseq-train, MiB", [TITLE, ATTENTION, *columns], notes)


def _ratios(comparison: Comparison) -> Table | None:
    """Perplexity and time over those of Transformer++; None where it is not compared."""
    plan, fused = comparison.options, comparison.spelled(FUSED)
    if fused not in plan.models:
        return None

    def cell(name: str, length: int) -> str:
        theirs, ours = _by_seed(comparison, fused, length), _by_seed(comparison, name, length)
        shared = theirs.keys() & ours.keys()
        if not shared:
            return MISSING
        time = comparison.seconds_per_step(name, length) / comparison.seconds_per_step(fused, length)
        return f"{spread([ours[seed] / theirs[seed] for seed in sorted(shared)])} / {time:.2f}"

    rows = [(ALL_MODELS[name].title, *(cell(name, length) for length in plan.lengths)) for name in plan.models]
    header = ("model", *(f"{length:,}" for length in plan.lengths))
    notes = ["perplexities of trainings with the same seed", _source_of_seconds(comparison)]
    return Table(f"Perplexity / seconds per step, over those of {ALL_MODELS[fused].title}", header, rows, notes)


def _by_seed(comparison: Comparison, name: str, length: int) -> dict[int, float]:
    """Seed -> perplexity."""
    return {record["seed"]: record["perplexity"] for record in comparison.of(name, length)}


def _added_perplexity(comparison: Comparison) -> Table | None:
    """Table 5; None unless both models of one of its rows are compared."""
    plan = comparison.options
    pairs = [tuple(map(comparison.spelled, pair)) for pair in _CHANGES]
    pairs = [pair for pair in pairs if set(pair) <= set(plan.models)]

    def cell(pair: tuple[str, str], length: int) -> str:
        before, after = (_by_seed(comparison, name, length) for name in pair)
        return spread([after[seed] - before[seed] for seed in before.keys() & after.keys()])

    if not pairs:
        return None
    rows = [
        (" → ".join(ALL_MODELS[name].title for name in pair), *(cell(pair, length) for length in plan.lengths))
        for pair in pairs
    ]
    header = ("", *(f"{length:,}" for length in plan.lengths))
    notes = ["the difference of two runs with the same seed; below 0 mixed chunk attention is better"]
    return Table("Perplexity added by mixed chunk attention (the paper's Table 5)", header, rows, notes)


def _speedup(comparison: Comparison) -> Table | None:
    """How much sooner each model reaches Transformer++'s last perplexity; None where it is not compared."""
    plan, fused = comparison.options, comparison.spelled(FUSED)
    if fused not in plan.models or not any(record["curve"] for record in comparison.records):
        return None

    def cell(architecture: str, length: int) -> str:
        theirs, ours = comparison.curve(fused, length), comparison.curve(architecture, length)
        if not theirs or not ours:
            return MISSING
        reached = seconds_until(ours, theirs[-1][1])
        return "never" if reached is None else f"{theirs[-1][0] / reached:.2f}"

    title = f"How many times sooner a model has {ALL_MODELS[fused].title}'s last perplexity (the paper's speed-up)"
    rows = [
        (ALL_MODELS[name].title, *(cell(name, length) for length in plan.lengths))
        for name in plan.models
        if name != fused
    ]
    header = ("model", *(f"{length:,}" for length in plan.lengths))
    return Table(title, header, rows, ["seconds of training steps; between two evaluations perplexity is a line"])


def seconds_until(curve: Sequence[tuple[float, float]], perplexity: float) -> float | None:
    """When a curve of seconds and perplexities first is at ``perplexity`` or below; None if never."""
    for i, (seconds, value) in enumerate(curve):
        if value <= perplexity:
            if i == 0:
                return seconds
            before, higher = curve[i - 1]
            return before + (seconds - before) * (higher - perplexity) / (higher - value)
    return None


def _parameters(records: Sequence[Record]) -> str:
    counts = sorted({record["parameters"] for record in records})
    return " to ".join(f"{count:,}" for count in counts[:: max(1, len(counts) - 1)])


def _break_even_notes(comparison: Comparison) -> list[str]:
    speeds: dict[str, dict[int, float]] = {}
    for model, length in dict.fromkeys((record["model"], record["length"]) for record in comparison.records):
        speeds.setdefault(model, {})[length] = 1.0 / comparison.seconds_per_step(model, length)
    fused = comparison.spelled(FUSED)
    if fused not in speeds:
        return []
    notes = []
    for model in speeds:
        if model != fused:
            length = break_even(speeds, model, fused)
            said = f"at least as fast from {length:,} tokens on" if length else "slower at the longest length"
            notes.append(f"{ALL_MODELS[model].title} against {ALL_MODELS[fused].title}: {said}")
    return notes


def _missing_notes(options: Any, facts: Record) -> list[str]:
    notes = []
    for case in facts["not_measured"]:
        seed = f" with seed {case['seed']}" if options.seeds > 1 else ""
        reason = f": {case['reason']}" if case["reason"] else ""
        notes.append(f"not measured: {case['model']} at {case['length']:,}{seed}{reason}")
    return notes
