"""Where a fairseq training goes on whose process was killed while fairseq wrote ``checkpoint_last.pt``."""

import shutil
import zipfile
from pathlib import Path

from tqdm import tqdm


def restore_last(folder: Path) -> None:
    """Make ``checkpoint_last.pt`` in ``folder`` whole, with the newest whole checkpoint beside it, and say so.

    fairseq writes the first file of an update as a whole, and copies it to the others: a copy may be cut short, and
    every restart then ends in an EOFError. Without another whole file the training begins anew. O(size of a file).
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
