"""The commands for each row of each table and for each figure, from ``flowformer.yaml``, ``flash.yaml``, ``daft.yaml``.

``trainings`` in such a file defines variables: the fields of ``Training``, and variables that texts name in braces.
``tables`` gives for each table the ``training`` of its rows, variables that override those of that training, and

* ``rows`` and ``columns``: name as printed -> a model, variables, or a list of these where a row compares models;
* ``not_trained``: name -> what a row is that is no model, perhaps with a command: "a bound: `python ...`";
* ``other_models``: name -> why no model of ours is trained, or a dictionary with this ``reason`` and the variables of a
  training, whose commands it gets;
* ``rows_of_all_columns``: variable of a shell loop -> name of a row -> the value of this variable with which the row
  trains the models of all columns;
* ``parameters``: the column (the row, if columns are models) with the published number of parameters in millions. The
  variable ``published`` has that number.

A block of commands may have ``loops``: variable -> values, or the name of a list of values. ``each`` replaces a block:
its ``blocks`` are repeated with each of a list of variables. ``figures`` has commands or reasons.
"""

import functools
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from .tables import PublishedTable, read_paper
from .trainings import HEADING, Block, Entry, NotTrained, Training

#: Entries by the name of a row, or by the header of a column where columns are the models.
Entries = dict[str, Entry]


class _Variables(ChainMap):
    """Variables by name. When a text is read, names in braces are filled in and runs of whitespace become one space."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return self.fill(value) if isinstance(value, str) else value

    def fill(self, text: str) -> str:
        """``text`` with the names in braces replaced by the variables."""
        return " ".join(text.format_map(self).split())


@functools.cache
def entries_of(paper: str) -> dict[str, Entries]:
    """The entries of each table of ``paper``, by its number."""
    content, tables = _read(paper), read_paper(paper).tables
    return {
        number: _entries(table, content["tables"][number], content["trainings"]) for number, table in tables.items()
    }


def command_of(paper: str, figure: str) -> str:
    """The command that draws a figure and begins with "python", or the reason why the figure is not drawn."""
    return _read(paper)["figures"][figure]


@functools.cache
def _read(paper: str) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name(f"{paper}.yaml").read_text(encoding="utf-8"))


def _entries(table: PublishedTable, described: dict[str, Any], trainings: dict[str, Any]) -> Entries:
    """The entries of a table, columns first, in the printed order."""

    def variables(name: str, model: str | dict[str, Any]) -> _Variables:
        own_variables = {"model": model} if isinstance(model, str) else model
        key = own_variables.get("training") or described["training"]
        return _complete(_Variables(own_variables, _published(table, described, name), described, trainings[key]))

    def training(name: str, model: str | dict[str, Any]) -> Training:
        return _training(variables(name, model))

    entries: Entries = {name: _not_trained(row) for name, row in described.get("not_trained", {}).items()}
    for name, row in described.get("other_models", {}).items():
        entries[name] = _other_model(row, functools.partial(variables, name))
    columns = described.get("columns", {})
    for name, model in (columns | described.get("rows", {})).items():
        row_trainings = [training(name, variant) for variant in (model if isinstance(model, list) else [model])]
        entries[name] = tuple(row_trainings) if isinstance(model, list) else row_trainings[0]
    for variable, rows in described.get("rows_of_all_columns", {}).items():
        for name, value in rows.items():
            entries[name] = tuple(_only(entries[column], variable, value) for column in columns)
    printed = (*table.header[1:], *(row.name for row in table.rows))
    if unknown := entries.keys() - set(printed):
        raise ValueError(f"Table {table.number} has entries for {', '.join(unknown)}; allowed: {', '.join(printed)}")
    return {name: entries[name] for name in printed if name in entries}


def _not_trained(row: str) -> NotTrained:
    """The entry of a row that is no model: a text, which may end with a command, as in "a bound: `python ...`"."""
    if row == HEADING.reason:
        return HEADING
    reason, _, command = row.partition(": `python ")
    commands = (f"python {command.removesuffix('`')}",)
    return NotTrained(reason, (Block(reason, commands),)) if command else NotTrained(row)


def _other_model(row: str | dict[str, Any], variables: Callable[[dict[str, Any]], _Variables]) -> NotTrained:
    """The entry of a model that is not ours: the reason, or the reason and the commands of a training."""
    if isinstance(row, str):
        return NotTrained(row, is_model=True)
    completed = variables(row)
    return NotTrained(row["reason"], tuple(_blocks(completed["blocks"], completed)), is_model=True)


def _published(table: PublishedTable, described: dict[str, Any], name: str) -> dict[str, str]:
    """The published number of parameters of the row or column ``name``; empty if the table has none."""
    where = described.get("parameters")
    if where is None:
        return {}
    if "columns" in described:
        return {"published": dict(zip(table.header, table.row(where).cells))[name]}
    return {"published": table.cell(name, where)}


def _complete(variables: _Variables) -> _Variables:
    """``variables`` with the name, the options and the folder of the model, which is ``NAME --option value``."""
    model = variables["model"]
    name, _, options = model.partition(" ")
    folder = model.replace(" --", ".").replace(" ", "_")  # each model has its own: "NAME.option_value"
    return _Variables(*variables.maps, {"name": name, "options": options, "folder": folder})


def _training(variables: _Variables) -> Training:
    """The training that ``variables`` describe."""
    published = variables.get("published")
    return Training(
        host=variables["host"],
        model=variables.get("shown", variables["model"]),
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
            for overrides in variables[block["each"]]:
                yield from _blocks(block["blocks"], variables.new_child(overrides))
            continue
        loops = []
        for name, values in block.get("loops", {}).items():
            values = variables[values] if isinstance(values, str) else values
            loops.append((name, tuple(map(str, values))))
        commands = tuple(map(variables.fill, block["commands"]))
        yield Block(variables.fill(block["title"]), commands, tuple(loops))


def _only(training: Training, variable: str, value: str) -> Training:
    """``training`` with the loop variable ``variable`` set to ``value``, without blocks whose loops lack this value."""
    blocks = []
    for block in training.blocks:
        loops = tuple((name, (value,) if name == variable else values) for name, values in block.loops)
        if value in dict(block.loops).get(variable, (value,)):
            blocks.append(block._replace(loops=loops))
    return replace(training, blocks=tuple(blocks))
