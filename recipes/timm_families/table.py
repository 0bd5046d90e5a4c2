"""The table of families: written from the survey's records, and read back by its test."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from recipes.shared.tables import Run, Table, as_markdown

from .survey import Found

#: The file that the plugin's README links.
PATH = Path(__file__).parents[2] / "timm_plugin" / "FAMILIES.md"

_HEADER = ("family", "models", "`attn_layer=`", "`replace_attention`", "replaced", "stays, because it")
_INTRODUCTION = """# timm's families and their attention

This file is made by a command; do not edit it. Each row is a file of timm's `models/`. A number is the number of models
for which that holds. [The README](README.md#another-attention-in-timms-own-models) says how to use this.

"""
_NOTES = (
    '`attn_layer=`: "yes" is a model that then holds our layers; "ignored" one that is built without them and without '
    "a word; else the exception that timm raises.",
    '`replace_attention`: "all", or "in part", of the attention can be replaced; "refused" is a ValueError with the '
    'reason; "no attention" is one, too.',
    "Each kind and shape of attention was compared with ours on random weights and tokens. For each family and class "
    "that is replaced, the smallest model was built and run: its output stayed the same with our softmax attention, "
    "and changed with Flow-Attention.",
)

_WENT_ON = "The run went on from the records of an earlier one; its minutes are those since then."


def as_document(records: Iterable[Found], run: Run, went_on: bool) -> str:
    """The whole Markdown file; ``went_on`` tells whether ``run`` continued from the records of an earlier run."""
    families = defaultdict(list)
    for record in sorted(records, key=lambda record: record.model):
        families[record.family].append(record)
    rows = [row(family, records) for family, records in sorted(families.items())]
    total = sum(len(records) for records in families.values())
    title = f"{total} models in {len(families)} families"
    notes = [*_NOTES, *[_WENT_ON] * went_on]
    return _INTRODUCTION + as_markdown([Table(title, _HEADER, rows, notes)], run) + "\n"


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


def timm_version(text: str) -> str:
    """The version of timm that the document was made with."""
    return re.search(r"\btimm (\d[\w.]*\w)", text)[1]


def _counted(counts: Counter, separator: str = ", ") -> str:
    return separator.join(f"{value}: {count}" for value, count in counts.most_common()) or "-"
