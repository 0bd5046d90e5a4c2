"""The measurements of a comparison, as tables, with notes on those that failed; ``report`` draws them."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..shared.comparison import Column, Compared, of_model, table
from ..shared.tables import MISSING, Table, break_even, spread
from .models import ALL_MODELS, SHAPE, Shape, masked_name
from .subword_text import SplitCounts

FUSED = "transformer_pp_lm"
#: Table 5: a model, and the same with mixed chunk attention.
_CHANGES = (("flash_quad_lm", "flash_lm"), ("transformer_pp_lm", "mc_transformer_pp_lm"))


class Measurement(NamedTuple):
    """One model trained and evaluated at one length with one seed."""

    architecture: str  # a name of ALL_MODELS
    length: int
    parameters: int
    perplexity: float  # of the valid split after the last update
    tokens_per_second: float  # median of fairseq's log
    peak_bytes: int  # of the whole fairseq-train process
    train_seconds: float
    command: str
    seed: int = 1
    curve: tuple[tuple[int, float], ...] = ()  # updates, and perplexity of the valid split after them


class Plan(NamedTuple):
    """The models and lengths, and the size, budget and batch of every model."""

    architectures: list[str]
    lengths: list[int]
    updates: int
    tokens_per_update: int
    vocabulary: int
    seeds: int = 1
    shape: Shape = SHAPE
    figure: int | None = None

    @property
    def masked(self) -> bool:
        """Whether the models are masked ones."""
        return ALL_MODELS[self.architectures[0]].masked

    def spelled(self, name: str) -> str:
        """The causal model ``name``, or the masked one in its place where models are masked."""
        return masked_name(name) if self.masked else name


#: A model, a length and a seed.
Case = tuple[str, int, int]


class Comparison(NamedTuple):
    """All measurements so far, and the failures."""

    plan: Plan
    text: dict[str, SplitCounts]
    measured: list[Measurement]
    failed: dict[Case, str]  # the last line of the reason

    def seconds_per_step(self, architecture: str, length: int) -> float | None:
        """The median over seeds; None without measurements."""
        speeds = [one.tokens_per_second for one in self.of(architecture, length)]
        return self.plan.tokens_per_update / statistics.median(speeds) if speeds else None

    def of(self, architecture: str, length: int) -> list[Measurement]:
        """The measurements of one model at one length, one for each seed."""
        return [one for one in of_model(self.measured, architecture) if one.length == length]

    def curve(self, architecture: str, length: int) -> list[tuple[float, float]]:
        """Seconds of training without evaluations, and the mean perplexity of all seeds then."""
        step, measured = self.seconds_per_step(architecture, length), self.of(architecture, length)
        points = zip(*(one.curve for one in measured))
        return [(at[0][0] * step, statistics.mean(point[1] for point in at)) for at in points]


def missing(comparison: Comparison) -> list[Case]:
    """Models, lengths and seeds of the plan that are not measured; all with one seed before any with the next."""
    done, plan = {(one.architecture, one.length, one.seed) for one in comparison.measured}, comparison.plan
    return [
        (architecture, length, seed)
        for seed in range(1, plan.seeds + 1)
        for length in plan.lengths
        for architecture in plan.architectures
        if (architecture, length, seed) not in done
    ]


def tables(comparison: Comparison) -> list[Table]:
    """Perplexity, seconds and memory, a row for each model and a column for each length; and what follows of them."""
    first = [_perplexity(comparison), _seconds(comparison), _memory(comparison)]
    return [*first, *filter(None, (_added_perplexity(comparison), _speedup(comparison)))]


TITLE = Column("model", known=lambda name: ALL_MODELS[name].title)
ATTENTION = Column("attention", known=lambda name: ALL_MODELS[name].attention)


def _table(comparison: Comparison, title: str, columns: list[Column], notes: list[str]) -> Table:
    return table(title, columns, comparison.plan.architectures, Compared(comparison.measured, {}), notes)


def _by_length(comparison: Comparison, cell: Callable[[list[Measurement]], str]) -> list[Column]:
    """A column for each length: ``cell`` of the measurements that have it."""

    def column(length: int) -> Column:
        def measured(outcomes: Sequence[Measurement]) -> str:
            ours = [one for one in outcomes if one.length == length]
            return cell(ours) if ours else MISSING

        return Column(f"{length:,}", measured)

    return [column(length) for length in comparison.plan.lengths]


def _perplexity(comparison: Comparison) -> Table:
    plan, valid = comparison.plan, comparison.text["valid"]
    columns = [
        TITLE,
        Column("architecture", known=lambda name: ALL_MODELS[name].architecture),
        Column("parameters", _parameters),
    ]
    columns += _by_length(comparison, lambda ours: spread([one.perplexity for one in ours]))
    of = f"of the valid split, {valid.tokens:,} subwords of a vocabulary of {plan.vocabulary:,}"
    if plan.masked:
        notes = [f"{of}: of the 15 % that are masked"]
    else:
        notes = [f"{of}; to the power of {valid.tokens_per_word:.4f} it is perplexity per word"]
    seeds = "one run, one seed" if plan.seeds == 1 else f"mean and standard deviation of {plan.seeds} seeds"
    notes.append(f"after {plan.updates} updates of {plan.tokens_per_update:,} tokens each; {seeds}")
    return _table(comparison, "Perplexity by sequence length", columns, notes)


def _seconds(comparison: Comparison) -> Table:
    per_update = comparison.plan.tokens_per_update

    def cell(ours: list[Measurement]) -> str:
        return f"{per_update / statistics.median(one.tokens_per_second for one in ours):.3f}"

    columns = _by_length(comparison, cell)
    notes = [f"{per_update:,} over the median of the tokens per second in fairseq's log"]
    title = f"Seconds per training step of {per_update:,} tokens"
    return _table(comparison, title, [TITLE, ATTENTION, *columns], [*notes, *_break_even_notes(comparison)])


def _memory(comparison: Comparison) -> Table:
    columns = _by_length(comparison, lambda ours: f"{max(one.peak_bytes for one in ours) / 2**20:,.0f}")
    notes = ["the whole process, Python and torch included", *_not_measured(comparison)]
    return _table(comparison, "Peak memory of fairseq-train, MiB", [TITLE, ATTENTION, *columns], notes)


def _added_perplexity(comparison: Comparison) -> Table | None:
    """Table 5; None unless both models of one of its rows are compared."""
    plan = comparison.plan
    pairs = [tuple(map(plan.spelled, pair)) for pair in _CHANGES]
    pairs = [pair for pair in pairs if set(pair) <= set(plan.architectures)]

    def cell(pair: tuple[str, str], length: int) -> str:
        before, after = (
            {one.seed: one.perplexity for one in comparison.of(architecture, length)} for architecture in pair
        )
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
    plan, fused = comparison.plan, comparison.plan.spelled(FUSED)
    if fused not in plan.architectures or not any(one.curve for one in comparison.measured):
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
        for name in plan.architectures
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


def _parameters(measured: Sequence[Measurement]) -> str:
    counts = sorted({one.parameters for one in measured})
    return " to ".join(f"{count:,}" for count in counts[:: max(1, len(counts) - 1)])


def _break_even_notes(comparison: Comparison) -> list[str]:
    speeds: dict[str, dict[int, float]] = {}
    for one in comparison.measured:
        median = statistics.median(x.tokens_per_second for x in comparison.of(one.architecture, one.length))
        speeds.setdefault(one.architecture, {})[one.length] = median
    fused = comparison.plan.spelled(FUSED)
    if fused not in speeds:
        return []
    notes = []
    for architecture in speeds:
        if architecture != fused:
            length = break_even(speeds, architecture, fused)
            said = f"at least as fast from {length:,} tokens on" if length else "slower at the longest length"
            notes.append(f"{ALL_MODELS[architecture].title} against {ALL_MODELS[fused].title}: {said}")
    return notes


def _named(case: Case, plan: Plan) -> str:
    architecture, length, seed = case
    return f"{architecture} at {length:,}" + (f" with seed {seed}" if plan.seeds > 1 else "")


def _not_measured(comparison: Comparison) -> list[str]:
    return [
        f"not measured: {_named(case, comparison.plan)}" + (f": {reason}" if reason else "")
        for case in missing(comparison)
        for reason in [comparison.failed.get(case)]
    ]
