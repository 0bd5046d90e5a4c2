"""Run fairseq-train with a progress bar, and read its last validation."""

import threading
from pathlib import Path

from tqdm import tqdm

from . import fairseq_log
from .commands import Finished, run, shown_path
from .fairseq_log import Point


def train(
    command: list[str],
    log: Path,
    total: int | None,
    title: str,
    *,
    by_update: bool = True,
    append: bool = False,
    threads: int | None = None,
    stopped: threading.Event | None = None,
) -> tuple[Finished, list[str]]:
    """Run a fairseq-train ``command`` of ``total`` updates, or epochs; returns its cost and the lines of ``log``.

    Args:
        append, threads: see ``commands.run``.
        stopped: the command ends once this is set.

    Raises:
        CommandFailed: fairseq-train failed.
        KeyboardInterrupt: ``stopped`` was set.
    """
    unit = " updates" if by_update else " epochs"
    with tqdm(total=total, desc=f"  {title}", unit=unit, leave=False, disable=None) as bar:

        def on_line(line: str) -> None:
            if stopped is not None and stopped.is_set():
                raise KeyboardInterrupt
            point = fairseq_log.parse_point(line)
            if point is not None:
                bar.update((point.update if by_update else point.epoch) - bar.n)
                bar.set_postfix_str(_progress(point))

        finished = run(command, log, on_line, append=append, threads=threads)
    return finished, log.read_text(encoding="utf-8").splitlines()


def _progress(point: Point) -> str:
    """Epoch, loss and accuracy of a point, for a progress bar."""
    measured = [f"{name} {point.values[name]:.4g}" for name in ("loss", "accuracy") if name in point.values]
    return ", ".join([f"epoch {point.epoch}", point.split, *measured])


def last_validation(points: list[Point], log: Path, updates: int) -> Point:
    """The validation at the end of a training of ``updates`` updates.

    Raises:
        ValueError: the last of ``points`` is not that validation.
    """
    if not points or points[-1].split != "valid" or points[-1].update != updates:
        raise ValueError(f"{shown_path(log)} does not end with a validation after update {updates}")
    return points[-1]
