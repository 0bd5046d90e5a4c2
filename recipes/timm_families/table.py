"""The table of families: written from the survey's records, and read back by its test."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from recipes.shared.tables import Run, Table, as_markdown

from .survey import Found

#: The file that the plugin's README links.
PATH = Path(__file__).parents[2] / "timm_plugin" / "FAMILIES.md"

_HEADER = ("family", "models", "`attn_layer=`", "`replace_attention`", "replaced", "stays, because it")
_INTRODUCTION = """# timm's families and their attention

This list says which of timm's own models can have another attention;
[the README](README.md#another-attention-in-timms-own-models) says how. A family is a file of timm's `models/`, and a
number is the number of models for which something holds. A command writes this file; do not edit it.

"""
_NOTES = (
    '`attn_layer=`: "yes" is a model that then holds our layers, "ignored" one that is built without them and without '
    "a warning; other words are the exception that timm raises.",
    '`replace_attention`: "all" of the attention can be replaced, or "in part"; "refused" and "no attention" are a '
    "ValueError.",
    "Each kind and shape of attention was compared with ours on random weights and tokens. For each family and class "
    "that is replaced, the smallest model was built and run: its output stayed the same with our softmax attention, "
    "and changed with Flow-Attention.",
)
_OTHERS = "In the other families, `attn_layer=` is an error of timm, and `replace_attention` a ValueError because of"
_NO_ATTENTION = "no attention"
#: Reasons that name inputs or parameters of a class, and the words for all of them.
_REASONS = {
    r"is called with .+ as well": "is called with more than tokens",
    r"has .+ of its own": "has more parameters",
}

_WENT_ON = "The run went on from the records of an earlier one; its minutes are those since then."


def as_document(records: Iterable[Found], run: Run, went_on: bool) -> str:
    """The whole Markdown file; ``went_on`` tells whether ``run`` continued from the records of an earlier run."""
    families = defaultdict(list)
    for record in sorted(records, key=lambda record: record.model):
        families[record.family].append(record)
    possible = {name: found for name, found in families.items() if any(map(_takes_ours, found))}
    others = [record for name, found in families.items() if name not in possible for record in found]
    rows = [row(family, found) for family, found in sorted(possible.items())]
    total = sum(len(found) for found in families.values())
    title = f"{total} models in {len(families)} families; {len(possible)} of these can have another attention"
    notes = [*map(_wrapped, [*_NOTES, *[_WENT_ON] * went_on]), f"{_OTHERS}\n{lines_of_others(others)}"]
    return _INTRODUCTION + as_markdown([Table(title, _HEADER, rows, notes)], run) + "\n"


def lines_of_others(records: Iterable[Found]) -> str:
    """A list of reasons why nothing is replaced in models, each with the families and their numbers of models."""
    groups = defaultdict(Counter)
    for record in records:
        groups[why_not(record)][record.family] += 1
    lines = []
    for reason, counts in sorted(groups.items(), key=lambda group: (group[0] == _NO_ATTENTION, -group[1].total())):
        names = ", ".join(f"`{family}`: {count}" for family, count in sorted(counts.items()))
        title = reason if reason == _NO_ATTENTION else f"attention that {reason}"
        lines.append(_wrapped(f"* {title}: {names}"))
    return textwrap.indent("\n".join(lines), "  ")


def why_not(record: Found) -> str:
    """Why nothing in a model is replaced: the reason for most of its attention, without the names in it."""
    if not record.stays:
        return _NO_ATTENTION
    _, _, reason = max(record.stays, key=record.stays.get).partition(" ")  # the class comes first
    for pattern, words in _REASONS.items():
        reason = re.sub(pattern, words, reason)
    return reason


def _wrapped(text: str) -> str:
    """Lines of an item of a list, which fit into 120 characters if the item is moved to the right by two."""
    return textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _takes_ours(record: Found) -> bool:
    return bool(record.replaced) or record.attn_layer in ("yes", "ignored")


def row(family: str, records: list[Found]) -> tuple[str, ...]:
    """The cells of one family's row."""
    return (
        f"`{family}`",
        str(len(records)),
        _counted(Counter(record.attn_layer for record in records)),
        _counted(Counter(record.outcome for record in records)),
        _counted(Counter(kind for record in records for kind in record.replaced)),
        _counted(Counter(reason for record in records for reason in record.stays), "; "),
    )


def read_rows(text: str) -> dict[str, dict[str, str]]:
    """Parse the rows of ``as_document``: family -> header -> cell."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    header, rows = [cell.strip() for cell in lines[0]], lines[2:]
    cells = ([cell.strip() for cell in row] for row in rows)
    return {row[0].strip("`"): dict(zip(header, row)) for row in cells}


def read_others(text: str) -> dict[str, dict[str, int]]:
    """Parse the list of ``as_document``: reason, or "no attention" -> family -> number of models."""
    items = re.split(r"\n  \* (?:attention that )?", text.partition(_OTHERS)[2].partition("\n\n")[0])[1:]
    return {
        item.partition(":")[0]: {family: int(count) for family, count in re.findall(r"`(\w+)`:\s+(\d+)", item)}
        for item in items
    }


def timm_version(text: str) -> str:
    """The version of timm that the document was made with."""
    return re.search(r"\btimm (\d[\w.]*\w)", text)[1]


def _counted(counts: Counter, separator: str = ", ") -> str:
    return separator.join(f"{value}: {count}" for value, count in counts.most_common()) or "-"
