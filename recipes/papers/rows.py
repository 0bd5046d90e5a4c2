"""The sections of PAPER.md, and the commands of PAPER.yaml."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

PAPERS = ("flowformer", "flash", "daft")
FOLDER = Path(__file__).parent


def sections(paper: str) -> dict[str, str]:
    """Number of a table, or "figures" -> its section, from the title on."""
    text = (FOLDER / f"{paper}.md").read_text(encoding="utf-8").strip()
    found = {}
    for section in text.split("\n## ")[1:]:
        title = re.match(r"(?:Table )?([^:\n]*)", section)[1]
        found[title.lower().replace(" ", "-")] = section
    return found


def groups(paper: str) -> dict[str, list[dict[str, Any]]]:
    """Number of a table -> its groups, with the commands of each of their ``rows``, and ``notes``."""
    tables = yaml.safe_load((FOLDER / f"{paper}.yaml").read_text(encoding="utf-8"))
    return {number: [filled(group) for group in listed] for number, listed in tables.items()}


def filled(group: dict[str, Any]) -> dict[str, Any]:
    """A group with the words of each row put into its command, once or for each item of a list."""
    command = group.get("command", "{}")
    rows = {row: words if isinstance(words, list) else [words] for row, words in group.get("rows", {}).items()}
    commands = {row: [command.replace("{}", words) for words in listed] for row, listed in rows.items()}
    return {"notes": {}, **group, "rows": commands}


def match(asked: str, names: Iterable[str]) -> list[str]:
    """The names that are ``asked``, whatever their case; else those that begin so, or with which it begins."""
    asked = asked.casefold()
    exact = [name for name in names if name.casefold() == asked]
    return exact or [x for x in names if x.casefold().startswith(asked) or asked.startswith(x.casefold())]
