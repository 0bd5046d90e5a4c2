"""Generated parts of Markdown files: from ``<!-- NAME: WORDS -->`` to ``<!-- end of NAME -->``."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from common.files.output_files import unfinished


def has_part(path: Path, name: str) -> bool:
    """Whether the file at ``path`` has a part called ``name``."""
    return f"<!-- end of {name} -->" in path.read_text(encoding="utf-8")


def rewritten(text: str, name: str, make: Callable[..., str]) -> str:
    """``text`` with every part called ``name`` replaced by ``make`` of the words of its first marker."""
    part = re.compile(rf"(<!-- {name}: (.+?) -->).*?(<!-- end of {name} -->)", re.DOTALL)
    return part.sub(lambda match: match[1] + make(*match[2].split()) + match[3], text)


def rewrite_files(
    paths: Iterable[Path], rewrite: Callable[[Path], str], command: str, write: bool = True
) -> list[Path]:
    """Write ``rewrite(path)`` to each of ``paths`` if ``write``; returns the files that change."""
    changed = []
    for path in paths:
        after = rewrite(path)
        if after != path.read_text(encoding="utf-8"):
            changed.append(path)
            if write:
                with unfinished(path, command) as new:
                    new.write_text(after, encoding="utf-8")
                    new.replace(path)
    return changed
