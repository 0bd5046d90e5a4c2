"""What was found as tables: what was to be reached and whether it was, every measurement, floors, and what is not."""

from collections.abc import Sequence

from ..tables import MISSING, Run, Table
from . import machine
from .cases import CASES
from .floors import floors
from .records import Record, Results
from .targets import TARGETS, Verdict
from .timing import quartiles

REACH = "What to reach"
_ANSWERS = {True: "yes", False: "no", None: MISSING}


def tables(results: Results) -> list[Table]:
    """All tables, the one of targets last, where a terminal shows it."""
    cases = dict.fromkeys(one.case for one in results.timed())
    found = [_measurements(results, case) for case in cases]
    found += filter(None, (_floor_table(results, case) for case in cases))
    return [*found, *_absences(results), *filter(None, [target_table(results)])]


def run_of(results: Results) -> Run:
    """The foot of the tables."""
    where = results.machine
    versions = f"Python {where.python}, {where.versions}; commit {where.commit}"
    return Run(where.command, machine.text(where), versions, where.date, where.minutes)


def verdicts(results: Results) -> list[tuple[str, str, str, Verdict]]:
    """Work, peer, reach and verdict of every target of the cases and the device of ``results``."""
    device = "cpu" if results.machine.device == "CPU" else "cuda"
    cases = {one.case for one in results.records}
    wanted = [target for target in TARGETS if target.case in cases and target.device == device]
    return [(target.work, target.peer, target.reach, target.judge(results)) for target in wanted]


def target_table(results: Results) -> Table | None:
    """Target, achieved, reached; None where the cases that were run have none."""
    rows = [
        (work, peer, reach, verdict.achieved, _ANSWERS[verdict.reached])
        for work, peer, reach, verdict in verdicts(results)
    ]
    notes = [
        "times: how many times as long the peer takes, the median over rounds in which both run next to each other",
        "memory: at its peak, beyond inputs, outputs and gradients",
    ]
    return Table(REACH, ("work", "beside", "to reach", "achieved", "reached"), rows, notes) if rows else None


def _measurements(results: Results, name: str) -> Table:
    """Every time of one case, each beside the first form of its size and run."""
    case = CASES[name]
    records = sorted((one for one in results.timed() if one.case == name), key=lambda one: (one.run, one.size))
    rows = [_row(results, one, records) for one in records]
    header = (
        case.axis,
        "run",
        "form",
        "ms",
        "quartiles",
        f"{case.unit}/s",
        "times the first",
        "MiB beyond",
        "x q, k, v",
    )
    kept = [i for i in range(len(header)) if any(row[i] != MISSING for row in rows)]
    cells = [[row[i] for i in kept] for row in rows]
    return Table(case.title, [header[i] for i in kept], cells, [case.note] if case.note else [])


def _row(results: Results, one: Record, records: Sequence[Record]) -> tuple[str, ...]:
    low, middle, high = (f"{1000 * seconds:.4g}" for seconds in quartiles(one.seconds))
    first = next(other for other in records if (other.run, other.size) == (one.run, one.size))
    times = MISSING if one is first else f"{results.ratio(one.case, one.size, one.run, first.form, one.form):.3g}"
    extra, inputs = MISSING, MISSING
    if one.extra_bytes is not None:
        extra = f"{one.extra_bytes / 2**20:,.1f}"
        inputs = f"{one.extra_bytes / one.input_bytes:.2f}" if one.input_bytes else MISSING
    speed = f"{one.per_second:,.0f}" if one.per_second >= 100 else f"{one.per_second:.3g}"
    return (f"{one.size:,}", one.run, one.form, middle, f"{low} to {high}", speed, times, extra, inputs)


def _floor_table(results: Results, case: str) -> Table | None:
    rows = [
        (
            f"{one.size:,}", one.run, f"{1000 * one.arithmetic:.3g}", f"{1000 * one.memory:.3g}",
            f"{1000 * one.achieved:.3g}", f"{one.fraction:.2f}",
        )
        for one in floors(results, case)
    ]  # fmt: skip
    header = ("tokens", "run", "arithmetic, ms", "memory, ms", "achieved, ms", "floor / achieved")
    notes = ["from the rates of this machine: the products of 64 tokens at a time, and each tensor moved once"]
    return Table(f"{CASES[case].title}: the floor", header, rows, notes) if rows else None


def _absences(results: Results) -> list[Table]:
    rows = [(one.case, f"{one.size:,}" if one.size else MISSING, one.form, one.status, one.reason)
            for one in results.records if one.reason]  # fmt: skip
    return [Table("Not timed", ("case", "size", "form", "why", ""), rows, [])] if rows else []
