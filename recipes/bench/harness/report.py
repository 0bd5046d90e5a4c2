"""Results as tables for a terminal: measurements, floors, disturbed and missing times, and verdicts on targets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...shared.tables import MISSING, Run, Table
from . import machine, noise
from .floors import floors
from .records import Record, Results
from .timing import quartiles
from .work import Case

REACH = "Targets"
#: The mark after the quartiles of noisy times.
NOISY = "~"
TARGET_NOTES = (
    "times: the median of the ratios of rounds in which both ran side by side; judged where no time is noisy",
    "memory: the peak beyond inputs, outputs and gradients",
    "the bound: the same if the candidate took no longer than its floor, or than its model without attention",
)


class Row(NamedTuple):
    """The cells of one measurement."""

    size: str
    run: str
    candidate: str
    ms: str
    quartiles: str
    per_second: str
    times: str  # over the first candidate of this size and run; in a family: of the other candidate over this one
    extra: str  # peak memory, MiB
    inputs: str  # MiB
    multiple: str  # extra / inputs
    load: str
    attempts: str


class Section(NamedTuple):
    """The measurements of one case, or of the cases of one family, by run and size."""

    title: str
    case: Case  # in a family: the first one
    rows: list[Row]
    notes: list[str]
    peers: str = ""  # in a family: the names of the other candidates


def tables(results: Results, cases: Mapping[str, Case], verdicts: Sequence[tuple]) -> list[Table]:
    """All tables, a row for each measurement; that of targets is last, where a terminal shows it.

    A verdict is (case, candidate, run and size, beside, to reach, achieved, reached) as texts; see ``targets.Verdict``.
    """
    blocks = [_table(section) for section in sections(results, cases)]
    blocks += filter(None, (_floor_table(results, case) for case in _timed_cases(results, cases)))
    header = ("case", "candidate", "run and size", "beside", "to reach", "achieved", "reached")
    targets = [Table(REACH, header, list(verdicts), list(TARGET_NOTES))] if verdicts else []
    return [*blocks, *noise_table(results), *_not_timed(results), *targets]


def _timed_cases(results: Results, cases: Mapping[str, Case]) -> list[Case]:
    """The cases with times, in the order of the results."""
    return [cases[name] for name in dict.fromkeys(record.case for record in results.timed())]


def sections(results: Results, cases: Mapping[str, Case]) -> list[Section]:
    """All times, by case; the cases of a family are together, after the others."""
    timed = _timed_cases(results, cases)
    families = dict.fromkeys(case.family for case in timed if case.family)
    return [
        *(_measurements(results, case) for case in timed if not case.family),
        *(_family(results, title, [case for case in timed if case.family == title]) for title in families),
    ]


def run_of(results: Results) -> Run:
    """The machine and the versions, for the foot of the tables."""
    run_machine = results.machine
    versions = f"Python {run_machine.python}, {run_machine.versions}; commit {run_machine.commit}"
    return Run(run_machine.command, machine.text(run_machine), versions, run_machine.date, run_machine.minutes)


def _measurements(results: Results, case: Case) -> Section:
    """Every time of one case, compared with the first candidate of its size and run."""
    records = _ordered(record for record in results.timed() if record.case == case.name)
    rows = [_row(results, record, records) for record in records]
    return Section(case.title, case, rows, [case.note] if case.note else [])


def _family(results: Results, title: str, cases: Sequence[Case]) -> Section:
    """The times of the first candidate of each case, and how many times as long the others take."""
    names = {case.name for case in cases}
    together: dict[tuple[str, str, int], list[Record]] = {}
    for record in _ordered(record for record in results.timed() if record.case in names):
        together.setdefault((record.case, record.run, record.size), []).append(record)
    rows = []
    for first, *others in together.values():
        ratios = (results.ratio(first.case, first.size, first.run, first.form, other.form) for other in others)
        times = ", ".join(_marked(f"{ratio:.3g}", other) for ratio, other in zip(ratios, others)) or MISSING
        rows.append(_row(results, first, [first])._replace(times=times))
    peers = ", ".join(dict.fromkeys(other.form for _, *others in together.values() for other in others))
    return Section(title, cases[0], rows, list(dict.fromkeys(case.note for case in cases)), peers)


def _ordered(records: Iterable[Record]) -> list[Record]:
    """Records by run and size; candidates stay in their order."""
    records = list(records)
    runs = list(dict.fromkeys(record.run for record in records))
    return sorted(records, key=lambda one: (runs.index(one.run), one.size))


def _header_of(section: Section) -> Row:
    """The header of the rows of ``section``."""
    case, times = section.case, f"times as long: {section.peers}" if section.peers else "times the first"
    inputs = (f"{case.inputs}, MiB", f"x {case.inputs}", "load before", "attempts")
    return Row(case.axis, "run", "candidate", "ms", "quartiles", f"{case.unit}/s", times, "peak MiB", *inputs)


def measured_columns(section: Section, columns: Iterable[int]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, with those of ``columns`` in which something was measured."""
    shown = [i for i in columns if any(row[i] != MISSING for row in section.rows)]
    header = _header_of(section)
    return [header[i] for i in shown], [[row[i] for i in shown] for row in section.rows]


def _table(section: Section) -> Table:
    return Table(section.title, *measured_columns(section, range(len(Row._fields))), section.notes)


def _row(results: Results, one: Record, records: Sequence[Record]) -> Row:
    low, middle, high = (milliseconds(seconds, 4) for seconds in quartiles(one.seconds))
    first = next(other for other in records if (other.run, other.size) == (one.run, one.size))
    times = MISSING if one is first else f"{results.ratio(one.case, one.size, one.run, first.form, one.form):.3g}"
    extra = MISSING if one.extra_bytes is None else f"{one.extra_bytes / 2**20:,.1f}"
    inputs = f"{one.input_bytes / 2**20:,.1f}" if one.input_bytes else MISSING
    multiple = MISSING if MISSING in (extra, inputs) else f"{one.extra_bytes / one.input_bytes:.2f}"
    speed = f"{one.per_second:,.0f}" if one.per_second >= 100 else f"{one.per_second:.3g}"
    interval = _marked(f"{low} to {high}", one)
    load, attempts = _percent(one.load), str(one.attempts) if one.attempts > 1 else MISSING
    size = f"{one.size:,}"
    return Row(size, one.run, one.form, middle, interval, speed, times, extra, inputs, multiple, load, attempts)


def milliseconds(seconds: float, digits: int) -> str:
    """A time with so many significant digits."""
    return f"{float(f'{1000 * seconds:.{digits}g}'):,.10g}"


def _marked(cell: str, one: Record) -> str:
    return f"{cell} {NOISY}" if one.noisy else cell


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.0f} %"


def _floor_table(results: Results, case: Case) -> Table | None:
    rows = [
        (
            f"{floor.size:,}",
            floor.run,
            floor.form,
            milliseconds(floor.arithmetic, 3),
            milliseconds(floor.memory, 3),
            _marked(milliseconds(floor.achieved, 3), results.find(case.name, floor.size, floor.run, floor.form)),
            f"{floor.fraction:.2f}",
        )
        for floor in floors(results, case)
    ]
    header = ("tokens", "run", "candidate", "arithmetic, ms", "memory, ms", "achieved, ms", "floor / achieved")
    notes = ["from the rates of this machine; recipes/bench/README.md says what is counted"]
    return Table(f"{case.title}: the floor", header, rows, notes) if rows else None


def noise_table(results: Results) -> list[Table]:
    """How many times were disturbed, and the rules by which they were repeated and marked."""
    timed = results.timed()
    repeated, noisy = sum(record.attempts > 1 for record in timed), sum(record.noisy for record in timed)
    load = max((record.load for record in timed if record.load is not None), default=None)
    header = ("times", "measured again", f"noisy ({NOISY})", "highest load before")
    notes = [
        f"a measurement is repeated, up to {noise.MOST_ATTEMPTS} times in all and for {noise.MOST_SECONDS:g} s, while "
        f"the quartiles of one of its candidates are further apart than {noise.ALLOWED_SPREAD:g} of the median; the "
        "quietest is kept",
        f"{NOISY} marks times that stayed further apart; no target of time is judged by them",
        f"load before: the share of all cores that other programs used in {noise.REST:g} s of rest",
    ]
    return (
        [Table("Noise", header, [(str(len(timed)), str(repeated), str(noisy), _percent(load))], notes)] if timed else []
    )


def _not_timed(results: Results) -> list[Table]:
    rows = [
        (record.case, f"{record.size:,}" if record.size else MISSING, record.form, record.status, record.reason)
        for record in results.records
        if record.reason
    ]
    return [Table("Not timed", ("case", "size", "candidate", "status", "reason"), rows, [])] if rows else []
