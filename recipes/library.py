"""Real text that every machine has: the source files of Python's library, each as one line that fairseq can read."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .texts import SPACE

#: Whitespace of a text that becomes one line -> its mark.
MARKS = {"\n": "⏎", "\t": "⇥", "\f": "␌"}
#: Folders of Python's library with tests, other packages, or tables of numbers.
_SKIPPED = {*"site-packages dist-packages test tests idle_test encodings pydoc_data lib2to3 turtledemo".split()}


def to_line(text: str) -> str:
    """``text`` as one line, with visible marks; ValueError if it has marks, or whitespace that has none."""
    if bad := {x for x in text if x in (*MARKS.values(), SPACE) or (x.isspace() and x not in (" ", *MARKS))}:
        raise ValueError(f"text has {sorted(bad)}; allowed: no marks, and no whitespace but space, \\n, \\t, \\f")
    return text.translate(str.maketrans(MARKS))


def from_line(line: str) -> str:
    """The inverse of ``to_line``; also replaces sentencepiece's mark of the space."""
    return line.translate(str.maketrans({mark: space for space, mark in MARKS.items()})).replace(SPACE, " ")


def read_library() -> Iterator[str]:
    """Real text that every machine has: the source files of Python's library, each once, in a fixed random order."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(folder) for path in folder.rglob("*.py"))
    seen = set()
    for name in sorted(names, key=lambda name: hashlib.sha256(name.as_posix().encode()).hexdigest()):
        size = (folder / name).stat().st_size
        if _SKIPPED.intersection(name.parts) or not 0 < size <= 60_000:  # one of the others would fill a small split
            continue
        try:
            text = (folder / name).read_text(encoding="utf-8").strip() + "\n"
            to_line(text)
        except ValueError:  # includes UnicodeDecodeError
            continue
        if text != "\n" and text not in seen:
            seen.add(text)
            yield text
