"""Run fairseq-train with a progress bar, and read its last validation."""

from pathlib import Path

from tqdm import tqdm

from . import fairseq_log
from .commands import Finished, run, shown_path
from .fairseq_log import Entry


def train(command: list[str], log: Path, updates: int, title: str) -> tuple[Finished, list[str]]:
    """Run a fairseq-train ``command`` of ``updates`` updates; returns its cost and the lines of ``log``.

    Raises:
        CommandFailed: fairseq-train failed.
    """
    with tqdm(total=updates, desc=f"  {title}", unit=" updates", leave=False, disable=None) as bar:

        def on_line(line: str) -> None:
            entry = fairseq_log.parse_entry(line)
            if entry is not None:
                bar.set_postfix_str(f"{'valid' if entry.kind == 'valid' else 'train'} {entry.loss:.2f} bits/token")
                bar.update(entry.update - bar.n)

        finished = run(command, log, on_line)
    return finished, log.read_text(encoding="utf-8").splitlines()


def last_validation(entries: list[Entry], log: Path, updates: int) -> Entry:
    """The validation at the end of a training of ``updates`` updates.

    Raises:
        ValueError: the last of ``entries`` is not that.
    """
    if not entries or entries[-1].kind != "valid" or entries[-1].update != updates:
        raise ValueError(f"{shown_path(log)} does not end with a validation after update {updates}")
    return entries[-1]
