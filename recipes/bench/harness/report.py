"""Results as tables: every measurement, floors, candidates that were not timed, and the verdicts on the targets."""

from collections.abc import Mapping, Sequence

from ...shared.tables import MISSING, Run, Table
from . import machine
from .floors import floors
from .records import Record, Results
from .timing import quartiles
from .work import Case

REACH = "Targets"
_ANSWERS = {True: "yes", False: "no", None: MISSING}


def tables(results: Results, cases: Mapping[str, Case], verdicts: Sequence[tuple]) -> list[Table]:
    """All tables, the one of targets last, where a terminal shows it.

    A verdict is (work, beside, to reach, achieved, whether it was reached or None), as in ``targets.Verdict``.
    """
    timed = [cases[name] for name in dict.fromkeys(one.case for one in results.timed())]
    blocks = [_measurements(results, case) for case in timed]
    blocks += filter(None, (_floor_table(results, case) for case in timed))
    return [*blocks, *_not_timed(results), *_targets(verdicts)]


def run_of(results: Results) -> Run:
    """The machine and the versions, for the foot of the tables."""
    where = results.machine
    versions = f"Python {where.python}, {where.versions}; commit {where.commit}"
    return Run(where.command, machine.text(where), versions, where.date, where.minutes)


def _targets(verdicts: Sequence[tuple]) -> list[Table]:
    rows = [(*texts, _ANSWERS[reached]) for *texts, reached in verdicts]
    notes = [
        "times: the median of the ratios of rounds in which both ran side by side",
        "memory: the peak beyond inputs, outputs and gradients",
    ]
    return [Table(REACH, ("work", "beside", "to reach", "achieved", "reached"), rows, notes)] if rows else []


def _measurements(results: Results, case: Case) -> Table:
    """Every time of one case, compared with the first candidate of its size and run."""
    records = [one for one in results.timed() if one.case == case.name]
    runs = list(dict.fromkeys(one.run for one in records))
    records.sort(key=lambda one: (runs.index(one.run), one.size))
    rows = [_row(results, one, records) for one in records]
    header = (
        case.axis,
        "run",
        "candidate",
        "ms",
        "quartiles",
        f"{case.unit}/s",
        "times the first",
        "peak MiB",
        f"{case.inputs}, MiB",
        f"x {case.inputs}",
    )
    kept = [i for i in range(len(header)) if any(row[i] != MISSING for row in rows)]
    cells = [[row[i] for i in kept] for row in rows]
    return Table(case.title, [header[i] for i in kept], cells, [case.note] if case.note else [])


def _row(results: Results, one: Record, records: Sequence[Record]) -> tuple[str, ...]:
    low, middle, high = (f"{1000 * seconds:.4g}" for seconds in quartiles(one.seconds))
    first = next(other for other in records if (other.run, other.size) == (one.run, one.size))
    times = MISSING if one is first else f"{results.ratio(one.case, one.size, one.run, first.form, one.form):.3g}"
    extra = MISSING if one.extra_bytes is None else f"{one.extra_bytes / 2**20:,.1f}"
    inputs = f"{one.input_bytes / 2**20:,.1f}" if one.input_bytes else MISSING
    multiple = MISSING if MISSING in (extra, inputs) else f"{one.extra_bytes / one.input_bytes:.2f}"
    speed = f"{one.per_second:,.0f}" if one.per_second >= 100 else f"{one.per_second:.3g}"
    return (f"{one.size:,}", one.run, one.form, middle, f"{low} to {high}", speed, times, extra, inputs, multiple)


def _floor_table(results: Results, case: Case) -> Table | None:
    rows = [
        (
            f"{one.size:,}",
            one.run,
            one.form,
            f"{1000 * one.arithmetic:.3g}",
            f"{1000 * one.memory:.3g}",
            f"{1000 * one.achieved:.3g}",
            f"{one.fraction:.2f}",
        )
        for one in floors(results, case)
    ]
    header = ("tokens", "run", "candidate", "arithmetic, ms", "memory, ms", "achieved, ms", "floor / achieved")
    notes = ["from the rates of this machine; recipes/bench/README.md says what is counted"]
    return Table(f"{case.title}: the floor", header, rows, notes) if rows else None


def _not_timed(results: Results) -> list[Table]:
    rows = [
        (one.case, f"{one.size:,}" if one.size else MISSING, one.form, one.status, one.reason)
        for one in results.records
        if one.reason
    ]
    return [Table("Not timed", ("case", "size", "candidate", "status", "reason"), rows, [])] if rows else []
