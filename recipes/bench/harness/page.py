"""Results as the tables of a page: a column for each size, and the texts of one measurement together in a cell."""

from collections.abc import Mapping, Sequence

from ...shared.tables import MISSING, Table, markdown_table
from .floors import Floor, floors
from .records import Results
from .report import REACH, TARGET_NOTES, Row, Section, measured_columns, milliseconds, noise_table, sections
from .work import Case

LEGEND = """A table has a row for each candidate. With several sizes, each has a column, and the lines of a cell are

* the median of the milliseconds of one call;
* its quartiles, with ~ if they are noisy;
* tokens, or what the case counts, per second;
* how many times as long it takes as the table's first candidate;
* the peak of memory beyond inputs, outputs and gradients, as a multiple of the inputs or of the decoding state;
* the load before, if it was not 0 %, and the number of attempts, if it is not 1.

A floor is the least milliseconds for arithmetic and for memory, computed from the rates of this machine; the larger of
both is given as a part of the measured time."""
#: Runs share a row if it has at most so many columns of measurements.
MOST_COLUMNS = 6
_LINE = "<br>"
#: Keeps a line of a cell on one line.
_SPACE = "\N{NO-BREAK SPACE}"


def text(results: Results, cases: Mapping[str, Case], verdicts: Sequence[tuple]) -> str:
    """All tables as Markdown, that of targets first; ``verdicts`` are those of ``report.tables``."""
    blocks = [_wide(results, section) for section in sections(results, cases)]
    blocks = [*_targets(verdicts), *blocks, *map(_in_words, noise_table(results)), *_not_timed(results)]
    return "\n\n".join(map(_markdown, blocks))


def _markdown(block: Table) -> str:
    """A heading, the notes below it, and the table."""
    head = f"### {block.title}\n" + "; ".join(block.notes)
    return "\n\n".join(filter(None, (head.rstrip(), markdown_table(block.header, block.rows) if block.rows else "")))


def _in_words(block: Table) -> Table:
    """The one row of a table as its first note."""
    words = ", ".join(f"{cell} {name}" for name, cell in zip(block.header, block.rows[0]))
    return block._replace(rows=[], notes=[words, *block.notes])


def _targets(verdicts: Sequence[tuple]) -> list[Table]:
    """Candidates with the same target share a row."""
    together: dict[tuple[str, ...], list[str]] = {}
    for case, candidate, place, beside, reach, achieved, reached in verdicts:
        together.setdefault((case, place, beside, reach), []).append(f"{candidate}: {achieved}, {reached}")
    rows = [(*target, _LINE.join(achieved)) for target, achieved in together.items()]
    header = ("case", "run and size", "beside", "to reach", "achieved, and whether it is reached")
    return [Table(REACH, header, rows, list(TARGET_NOTES))] if rows else []


def _wide(results: Results, section: Section) -> Table:
    """A column for each size, or for each run and size; a plain table if there is only one."""
    axis, notes = section.case.axis, list(section.notes)
    least = [] if section.peers else floors(results, section.case)
    places = list(dict.fromkeys((row.run, row.size) for row in section.rows))
    if len(places) == 1 and not least:
        columns = range(Row._fields.index("candidate"), len(Row._fields))
        return Table(f"{section.title} ({axis}: {places[0][1]})", *measured_columns(section, columns), notes)
    runs = list(dict.fromkeys(run for run, _ in places))
    by_run = len(runs) > 1 and len(places) > MOST_COLUMNS

    def column(run: str, size: str) -> str:
        return size if by_run or len(runs) == 1 else f"{run}, {size}"

    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for run, size, candidate, cell in [*map(_measured, section.rows), *map(_floor, least)]:
        cells.setdefault((run, candidate) if by_run else (candidate,), {})[column(run, size)] = cell
    if section.peers:
        notes.append(f"times: how many times as long {section.peers} takes")
    columns = list(dict.fromkeys(column(*place) for place in places))
    labels = sorted(cells, key=lambda label: runs.index(label[0])) if by_run else list(cells)
    rows = [(*label, *(cells[label].get(name, MISSING) for name in columns)) for label in labels]
    return Table(f"{section.title}, by {axis}", [*(["run"] if by_run else []), "candidate", *columns], rows, notes)


def _measured(row: Row) -> tuple[str, ...]:
    """Run, size, label and cell of a measurement."""
    return row.run, row.size, row.candidate, _cell(row)


def _floor(floor: Floor) -> tuple[str, ...]:
    """Run, size, label and cell of a floor."""
    arithmetic, memory = milliseconds(floor.arithmetic, 3), milliseconds(floor.memory, 3)
    lines = (f"{arithmetic} arithmetic", f"{memory} memory", f"{floor.fraction:.2f} of the time")
    return floor.run, f"{floor.size:,}", f"floor of {floor.form}", _lines(lines)


def _cell(row: Row) -> str:
    """The texts of one measurement; what was not measured is left out."""
    lines = [f"**{row.ms}**", row.quartiles, f"{row.per_second}/s"]
    if row.times != MISSING:
        lines.append(f"{row.times} times")
    if row.extra != MISSING:
        lines.append(f"{row.extra} MiB" + ("" if row.multiple == MISSING else f" = {row.multiple} x {row.inputs}"))
    if row.load not in (MISSING, "0 %"):
        lines.append(f"load {row.load}")
    if row.attempts != MISSING:
        lines.append(f"{row.attempts} attempts")
    return _lines(lines)


def _lines(lines: Sequence[str]) -> str:
    return _LINE.join(line.replace(" ", _SPACE) for line in lines)


def _not_timed(results: Results) -> list[Table]:
    """Sizes that were not timed for the same reason share a row."""
    together: dict[tuple[str, ...], list[str]] = {}
    for record in results.records:
        if record.reason:
            key = (record.case, record.form, record.status, record.reason)
            together.setdefault(key, []).append(f"{record.size:,}" if record.size else MISSING)
    rows = [(case, "; ".join(sizes), *rest) for (case, *rest), sizes in together.items()]
    return [Table("Not timed", ("case", "size", "candidate", "status", "reason"), rows, [])] if rows else []
