"""Repair ``checkpoint_last.pt`` after a fairseq training was killed while it wrote that file."""

import shutil
import zipfile
from pathlib import Path

from tqdm import tqdm


def restore_last(folder: Path) -> None:
    """Replace a truncated ``checkpoint_last.pt`` in ``folder`` by the newest complete checkpoint, and print that.

    fairseq writes the first file of an update completely, and copies it to the others: a copy may be truncated, and
    every restart then ends in an EOFError. Without another complete file the training starts over. O(size of a file).
    """
    last = folder / "checkpoint_last.pt"
    if not last.exists() or zipfile.is_zipfile(last):  # torch writes zip files, whose table of contents is at the end
        return
    others = [path for path in folder.glob("checkpoint*.pt") if path != last and zipfile.is_zipfile(path)]
    if not others:
        tqdm.write(f"  {last} was cut short, and no other checkpoint is there: the training begins anew")
        last.unlink()
        return
    newest = max(others, key=lambda path: path.stat().st_mtime)
    tqdm.write(f"  {last} was cut short: the training goes on from {newest.name}")
    part = folder / "checkpoint_last.pt.part"
    shutil.copyfile(newest, part)
    part.replace(last)
