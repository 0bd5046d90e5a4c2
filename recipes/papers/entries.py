"""The commands of each row of each table and of each figure, from ``flowformer.yaml``, ``flash.yaml``, ``daft.yaml``.

``trainings`` of such a file has named variables: those of ``Training``, and others that its texts name in braces.
``tables`` says for each table which ``training`` its rows have, variables in place of that training's, and

* ``rows`` and ``columns``: name as printed -> a model, variables, or a list of these where a row compares models;
* ``not_trained``: name -> the reason;
* ``rows_of_all_columns``: a variable of a shell's loop -> name of a row -> the one value of this variable with which
  the row trains the models of all columns;
* ``parameters``: the column, or where columns are models the row, that has the published millions of parameters; the
  number is the variable ``published``.

A block of commands may have ``loops``, variable -> values, or the name of a list of values. ``each`` stands in the
place of a block: its ``blocks`` are repeated with each of a list of variables. ``figures`` has commands or reasons.
"""

import functools
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from .tables import PublishedTable, read_paper
from .trainings import HEADING, Block, Entry, NotTrained, Training

#: Entries by the name of a row, or by the header of a column where columns are the models.
Entries = dict[str, Entry]


class _Variables(ChainMap):
    """Variables by name; the names in braces in a text are filled in when it is read, and spaces are single."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return self.fill(value) if isinstance(value, str) else value

    def fill(self, text: str) -> str:
        """``text`` with variables in the place of their names."""
        return " ".join(text.format_map(self).split())


@functools.cache
def entries_of(paper: str) -> dict[str, Entries]:
    """The entries of each table of ``paper``, by its number."""
    content, tables = _read(paper), read_paper(paper).tables
    return {
        number: _entries(table, content["tables"][number], content["trainings"]) for number, table in tables.items()
    }


def command_of(paper: str, figure: str) -> str:
    """The command that draws a figure, which begins with "python", or the reason why there is none."""
    return _read(paper)["figures"][figure]


@functools.cache
def _read(paper: str) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name(f"{paper}.yaml").read_text(encoding="utf-8"))


def _entries(table: PublishedTable, described: dict[str, Any], trainings: dict[str, Any]) -> Entries:
    """The entries of a table, columns first, in the order in which they are printed."""

    def training(name: str, model: str | dict[str, Any]) -> Training:
        own = {"model": model} if isinstance(model, str) else model
        named = own.get("training") or described["training"]
        return _training(_Variables(own, _published(table, described, name), described, trainings[named]))

    entries: Entries = {name: _not_trained(reason) for name, reason in described.get("not_trained", {}).items()}
    columns = described.get("columns", {})
    for name, model in (columns | described.get("rows", {})).items():
        made = [training(name, one) for one in (model if isinstance(model, list) else [model])]
        entries[name] = tuple(made) if isinstance(model, list) else made[0]
    for variable, rows in described.get("rows_of_all_columns", {}).items():
        for name, value in rows.items():
            entries[name] = tuple(_only(entries[column], variable, value) for column in columns)
    printed = (*table.header[1:], *(row.name for row in table.rows))
    if unknown := entries.keys() - set(printed):
        raise ValueError(f"Table {table.number} has entries for {', '.join(unknown)}; allowed: {', '.join(printed)}")
    return {name: entries[name] for name in printed if name in entries}


def _not_trained(reason: str) -> NotTrained:
    return HEADING if reason == HEADING.reason else NotTrained(reason)


def _published(table: PublishedTable, described: dict[str, Any], name: str) -> dict[str, str]:
    """The published number of parameters of the row or column ``name``; nothing where the table has none."""
    where = described.get("parameters")
    if where is None:
        return {}
    if "columns" in described:
        return {"published": dict(zip(table.header, table.row(where).cells))[name]}
    return {"published": table.cell(name, where)}


def _training(variables: _Variables) -> Training:
    """The training of a model with options, ``NAME --option value``, which also are variables of their own."""
    model = variables["model"]
    name, _, options = model.partition(" ")
    folder = model.replace(" --", ".").replace(" ", "_")  # of its own: "NAME.option_value"
    variables = _Variables(*variables.maps, {"name": name, "options": options, "folder": folder})
    published = variables.get("published")
    return Training(
        host=variables["host"],
        model=variables.get("shown", model),
        settings={key: variables.fill(text) for key, text in variables["settings"].items()},
        hardware=variables["hardware"],
        blocks=tuple(_blocks(variables["blocks"], variables)),
        published=float(published) if published else None,
        difference=variables.get("difference", ""),
        symbols=variables.get("symbols", 0),
        note=variables.get("note", ""),
    )


def _blocks(described: list[dict[str, Any]], variables: _Variables) -> Iterator[Block]:
    for block in described:
        if "each" in block:
            for own in variables[block["each"]]:
                yield from _blocks(block["blocks"], variables.new_child(own))
            continue
        loops = []
        for name, values in block.get("loops", {}).items():
            values = variables[values] if isinstance(values, str) else values
            loops.append((name, tuple(map(str, values))))
        commands = tuple(map(variables.fill, block["commands"]))
        yield Block(variables.fill(block["title"]), commands, tuple(loops))


def _only(training: Training, variable: str, value: str) -> Training:
    """``training`` with one value of a variable of its loops, and without the blocks that do not have it."""
    blocks = []
    for block in training.blocks:
        loops = tuple((name, (value,) if name == variable else values) for name, values in block.loops)
        if value in dict(block.loops).get(variable, (value,)):
            blocks.append(block._replace(loops=loops))
    return replace(training, blocks=tuple(blocks))
