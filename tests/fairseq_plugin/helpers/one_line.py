"""Refusals as users meet them: one line that names what is wrong, and not a file changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, and their bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def refused_in_one_line(folder: Path, *words: str) -> Iterator[None]:
    """Expect a command or a function to end with one line that has ``words``; below ``folder`` nothing changes."""
    before, there = tree(folder), sorted(folder.rglob("*"))
    with pytest.raises((SystemExit, ValueError)) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line and len(line) < 5000 and all(word in line for word in ("allowed", *words)), line
    assert tree(folder) == before and sorted(folder.rglob("*")) == there
