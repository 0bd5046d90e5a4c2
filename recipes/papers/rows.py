"""The sections of PAPER.md with the published numbers, and the commands of PAPER.yaml."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..runs import published

PAPERS = ("flowformer", "flash", "daft")
FOLDER = Path(__file__).parent


def sections(paper: str) -> dict[str, str]:
    """Number of a table, or "figures" -> its section, from the title on."""
    found = (FOLDER / f"{paper}.md").read_text(encoding="utf-8").strip().split("\n## ")[1:]
    return {re.match(r"(?:Table )?([^:\n]*)", x)[1].lower().replace(" ", "-"): x for x in found}


def groups(paper: str) -> dict[str, list[dict[str, Any]]]:
    """Number of a table -> its groups; ``rows`` are lists of commands, one for each item of a list of words."""
    tables = yaml.safe_load((FOLDER / f"{paper}.yaml").read_text(encoding="utf-8"))
    return {number: [{**group, "rows": commands(group)} for group in listed] for number, listed in tables.items()}


def commands(group: dict[str, Any]) -> dict[str, list[str]]:
    """The words of each row in the group's command."""
    command = group.get("command", "{}")
    words = {row: given if isinstance(given, list) else [given] for row, given in group.get("rows", {}).items()}
    return {row: [command.replace("{}", x) for x in given] for row, given in words.items()}


def match(asked: str, names: Iterable[str]) -> list[str]:
    """The names that are ``asked``, whatever their case; else those that begin so, or with which it begins."""
    asked = asked.casefold()
    exact = [name for name in names if name.casefold() == asked]
    return exact or [x for x in names if x.casefold().startswith(asked) or asked.startswith(x.casefold())]


def printed(paper: str, number: str, row: str, column: str) -> str:
    """A cell of a table as printed: ``row`` is as in PAPER.yaml, and the column's header begins with ``column``."""
    cells = published(paper, number)
    name, *conditions = row.split(", ")  # as in "DAFT-conv, Heads 16"
    rows = cells[cells.index.str.startswith(row)]
    if rows.empty:
        rows = cells[cells.index == name]
        for header, _, value in (condition.rpartition(" ") for condition in conditions):
            rows = rows[rows[header] == value]
    return rows.loc[:, rows.columns.str.startswith(column)].iloc[rows.index.str.len().argmin(), 0]
