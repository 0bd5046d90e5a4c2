"""The trainings that the documents show: the shell reads each block, and what it would start is written down.

Programs are small scripts that note their arguments. Others than those in ``TOOLS`` are not found, so no block does
anything but write files into its folder, and loops, variables and scripts such as ``recipes/lra/train.sh`` work.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.processes import CHECKOUT
from tests.readmes import blocks, readmes

#: Programs of the system that blocks may run.
TOOLS = "bash sh echo sed tr seq cat dirname basename mkdir cut head tail".split()
#: Programs that are noted. ``torchrun`` also runs what follows its own options, as far as that is a shell's text.
NOTED = ("fairseq-train", "python", "torchrun")
_NOTE = """#!/bin/sh
for word in "${0##*/}" "$@"; do printf '%s\\0' "$word"; done >> "$NOTES"
printf '\\n' >> "$NOTES"
[ "$*" = "-m fairseq_plugin" ] && echo fairseq_plugin
for word in "$@"; do [ "$last" = -c ] && [ "${0##*/}" = torchrun ] && exec bash -c "$word"; last=$word; done
exit 0
"""


class Training(NamedTuple):
    """Arguments of fairseq-train or of timm's train.py, and the place in a document that shows them."""

    place: str
    host: str  # fairseq or timm
    arguments: tuple[str, ...]


def trainings() -> list[Training]:
    """All trainings in Markdown files, and in the scripts that their blocks start; those with gaps (...) as well."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        programs = folder / "programs"
        programs.mkdir()
        for name in NOTED:
            (programs / name).write_text(_NOTE)
            (programs / name).chmod(0o755)
        for name in TOOLS:
            (programs / name).symlink_to(shutil.which(name))
        return [
            Training(block.place, *found)
            for path in readmes()
            for block in blocks(path)
            if block.language == "shell"
            for found in _started(block.code, folder)
        ]


def _started(code: str, folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The trainings that the block ``code`` starts: host and arguments."""
    here, notes = folder / "here", folder / "notes"
    here.mkdir()
    for name in ("common", "fairseq_plugin", "timm_plugin", "recipes"):
        (here / name).symlink_to(CHECKOUT / name)
    notes.write_bytes(b"")
    environment = {
        "PATH": str(folder / "programs"),
        "NOTES": str(notes),
        "HOME": str(here),
        "WORLD_SIZE": "1",
        "RANK": "0",
    }
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["bash", "-c", code], cwd=here, env=environment, timeout=60, **silent)
    shutil.rmtree(here)
    for line in notes.read_text().split("\0\n"):
        words = line.split("\0")
        for i, word in enumerate(words):
            if os.path.basename(word) in ("fairseq-train", "train.py"):
                yield ("fairseq" if "fairseq" in word else "timm"), tuple(words[i + 1 :])
                break
