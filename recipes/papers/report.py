"""The texts of ``python -m recipes.papers``: papers, a table with our measurements, and a row's commands."""

import textwrap
from collections.abc import Iterable

from .building import count_parameters
from .entries import entries_of
from .measured import Measured, measured, published_cells, run_here, runs_of, said_of_order, value
from .small import small_command
from .tables import Figure, Paper, PublishedTable
from .trainings import HEADING, Block, Entry, NotTrained, Training, blocks_of, here, script, trainings_of

_WIDTH = 118


def list_papers(papers: Iterable[Paper]) -> str:
    """A line for each table and figure."""
    lines = []
    for paper in papers:
        lines += ["", f"{paper.name}: {paper.about}"]
        for number, table in paper.tables.items():
            entries = entries_of(paper.name)[number]
            models = [entry for entry in entries.values() if entry != HEADING]
            trained = sum(bool(blocks_of(entry)) for entry in models)
            lines.append(f"  {number:15} {table.title} ({trained} of {len(models)} have commands)")
        lines += [f"  {key(figure):15} {_cut(figure.caption)}" for figure in paper.figures.values()]
    return "\n".join(lines[1:])


def show_table(paper: Paper, table: PublishedTable) -> str:
    """The table as printed, the paper's notes on it, the models that train its rows, and our measurements."""
    entries = entries_of(paper.name)[table.number]
    lines = [f"{paper.title}, Table {table.number}: {table.title}", "", *_columns([table.header, *_cells(table)]), ""]
    lines += [line for note in table.notes for line in _filled(note)]
    lines += [line for note in table.contradictions for line in _filled(f"Contradiction: {note}")]
    measurements = measured(paper.name, table.number)
    lines += ["", "Here:", "", *_columns(_here(entries, measurements))]
    for comparison in measurements:
        lines += ["", *_measured(table, comparison)]
    if not measurements:
        lines += ["", "No row was run here."]
    small = small_command(paper.name, table.number)
    lines += ["", f"All rows in one comparison: {small}"] if small else []
    command = f"python -m recipes.papers {paper.name} {table.number} --row NAME"
    return "\n".join([*lines, "", f"The commands of a row: {command}"])


def show_entry(paper: Paper, table: PublishedTable, name: str, entry: Entry) -> str:
    """Shell comments that describe how a row is trained, and a script from data to evaluation, if it has commands."""
    head = [f"{paper.title}, Table {table.number}, {name}"]
    if name in [row.name for row in table.rows]:
        printed = zip(table.header[1:], table.row(name).cells[1:])
        head.append("published: " + ", ".join(f"{header} {cell}" for header, cell in printed if cell))
    else:  # a column
        i = table.header.index(name)
        head.append("published: " + ", ".join(f"{row.name} {row.cells[i]}" for row in table.rows if row.cells[i]))
    for training in trainings_of(entry):
        head += ["", *_described(training)]
    if isinstance(entry, NotTrained):
        head.append(f"no command: {entry.reason}" if entry.lacks_command else f"no training of ours: {entry.reason}")
    else:
        head += ["", *runs_of(name, measured(paper.name, table.number))]
    comments = [f"# {part}".rstrip() for line in head for part in (_filled(line) or [""])]
    blocks = blocks_of(entry)
    return "\n\n".join(["\n".join(comments), *([script(blocks)] if blocks else [])])


def show_figure(paper: Paper, figure: Figure, command: str) -> str:
    """A figure's caption, and the command that draws it, or the reason why it is not drawn."""
    head = _filled(f"{paper.title}, Figure {figure.number}: {figure.caption}")
    if not command.startswith("python "):
        return "\n".join([*head, *_filled(f"not drawn: {command}")])
    comparisons = measured(paper.name, key(figure))
    lines = [line for one in comparisons for line in ("", *_drawn(one))]
    if not any(one.picture for one in comparisons):
        lines.append("Not drawn here.")
    drawn = "a command that draws it for other models" if comparisons else "the command that draws it"
    comments = [f"# {line}".rstrip() for line in head + lines]
    return "\n".join([*comments, Block(drawn, (command,)).printed()])


def key(figure: Figure) -> str:
    """The name of a figure on the command line."""
    return f"figure-{figure.number}"


def _here(entries: dict[str, Entry], found: list[Measured]) -> list[tuple[str, ...]]:
    rows = [("row", "here", "parameters", "published", "run here", "")]
    for name, entry in entries.items():
        trainings = trainings_of(entry)
        listed = trainings[:2] if len(trainings) < 3 else ()
        parameters = ", ".join(f"{count / 1e6:.1f} M" for training in listed if (count := count_parameters(training)))
        published = ", ".join(
            dict.fromkeys(f"{training.published:g} M" for training in trainings if training.published)
        )
        notes = "; ".join(
            dict.fromkeys(note for training in listed for note in (training.difference, training.note) if note)
        )
        shown = here(entry).replace("`", "") if listed or not trainings else f"{len(trainings)} models"
        rows.append((name, shown, parameters, published, run_here(name, entry, found), notes))
    return rows


def _measured(table: PublishedTable, one: Measured) -> list[str]:
    published = published_cells(table, one.column, list(one.cells), one.part)
    ordered = sorted(one.cells, key=lambda name: value(published[name]), reverse=one.higher_is_better)
    over = one.ratio_to
    measured_here = f"measured here, over {over}" if over else "measured here"
    shown = [(f"{one.column}, published order", f"published (over {over})" if over else "published", measured_here)]
    shown += [(name, _published(published, name, over), one.cells[name]) for name in ordered]
    scale = "" if one.full_size else " Another experiment: it confirms and refutes no row."
    remarks = f"{said_of_order(one.cells, published)}{scale} {one.limits}"
    return [
        *_filled(f"Measured here{f' ({one.scale})' if one.scale else ''}: {one.what}"),
        "",
        *_columns(shown),
        "",
        *_filled(remarks),
        one.command,
        f"{one.machine}, {one.date}",
    ]


def _published(cells: dict[str, str], name: str, ratio_to: str) -> str:
    """A published number, and that number over the one of ``ratio_to``, if it is a name."""
    return f"{cells[name]} ({value(cells[name]) / value(cells[ratio_to]):.2f})" if ratio_to else cells[name]


def _drawn(one: Measured) -> list[str]:
    """The lines of a comparison of the models of a figure."""
    table = ["", *_columns([("model", one.column), *one.cells.items()])] if one.cells else []
    return [
        *_filled(f"{f'Drawn in {one.picture}' if one.picture else 'Measured here'}: {one.what}"),
        *table,
        "",
        *_filled(one.limits),
        one.command,
        f"{one.machine}, {one.date}",
    ]


def _described(training: Training) -> list[str]:
    lines = [words_of(training)]
    count = count_parameters(training)
    if count:
        paper = f"; the paper: {training.published:g} M" if training.published else "; this table states none"
        lines.append(f"parameters: {count / 1e6:.1f} M{paper}")
    lines += [line for line in (training.difference, training.note) if line]
    lines += [f"{name}: {value}" for name, value in training.settings.items()]
    return [*lines, f"published with: {training.hardware}"]


def words_of(training: Training) -> str:
    """A training in words: its host and its model."""
    return f"{training.host or 'no host'}: {training.model}"


def _cells(table: PublishedTable) -> list[tuple[str, ...]]:
    return [row.cells for row in table.rows]


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of text with the cells of ``rows`` aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [f"  {line}" for line in (lines[0], "  ".join("-" * width for width in widths), *lines[1:])]


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)


def _cut(caption: str) -> str:
    return textwrap.shorten(caption, 90, placeholder=" ...")
