"""Random ListOps expressions in blocks, written by several processes; each block has its own random generator."""

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..shared.text_files import read_lines, write_lines
from .listops_rules import draw

#: Expressions per block: the unit of work of a process, and the most that an interruption loses.
BLOCK = 500
#: After this many blocks in a row without a new expression there are considered to be too few expressions.
_PATIENCE = 5


class Plan(NamedTuple):
    """Settings of the expressions to generate. Folders with the same plan have the same bytes."""

    seed: int
    train: int
    valid: int
    test: int
    min_length: int  # every expression has more symbols
    max_length: int  # and fewer than this


def check_plan(plan: Plan) -> None:
    """Raise ValueError if no expression has a length allowed by ``plan``; lengths are 1, or 4 and more symbols."""
    shortest = 1 if plan.min_length < 1 else max(plan.min_length + 1, 4)
    if shortest >= plan.max_length:
        raise ValueError(
            f"--min-length is {plan.min_length} and --max-length {plan.max_length}; allowed: lengths between which "
            f"expressions lie, so with this --min-length a --max-length of at least {shortest + 1}"
        )


def distinct_lines(plan: Plan, folder: Path, total: int, processes: int) -> Iterator[str]:
    """Yield ``total`` different lines "symbols TAB value", always the same ones for the same plan.

    The blocks are kept in ``folder`` for the next call.

    Raises:
        ValueError: there are not enough different expressions.
    """
    seen: set[bytes] = set()
    blocks_without_new = 0
    with contextlib.closing(_blocks(plan, folder, total, processes)) as blocks:
        for path in blocks:
            seen_before = len(seen)
            for line in read_lines(path):
                digest = hashlib.blake2b(line.encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield line
                    if len(seen) == total:
                        return
            blocks_without_new = blocks_without_new + 1 if len(seen) == seen_before else 0
            if blocks_without_new == _PATIENCE:
                raise ValueError(
                    f"--train, --valid and --test ask for {total:,} different expressions; allowed: about "
                    f"{len(seen):,}, all that were found with --min-length {plan.min_length} and --max-length "
                    f"{plan.max_length}"
                )


def _blocks(plan: Plan, folder: Path, total: int, processes: int) -> Iterator[Path]:
    """Yield block after block, without end."""
    folder.mkdir(parents=True, exist_ok=True)
    make = partial(_make_block, plan, folder)
    planned_blocks = -(-total // BLOCK)
    # fork, since spawned interpreters would import the recipe, and torch with it.
    with multiprocessing.get_context("fork").Pool(min(processes, planned_blocks), _end_with, (os.getpid(),)) as pool:
        yield from pool.imap(make, range(planned_blocks))
    yield from map(make, itertools.count(planned_blocks))  # to replace duplicates


def _end_with(parent: int) -> None:
    """End this process when ``parent`` ends, even by kill -9; otherwise workers would continue and lock the folder."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_block(plan: Plan, folder: Path, number: int) -> Path:
    """Write one block unless it exists; returns its path."""
    path = folder / f"{number:06d}.tsv"
    if not path.exists():
        # Python's random accepts a string as seed, with the same result on every machine.
        rng = random.Random(f"ListOps {plan.seed} {number}")
        expressions = (draw(rng, plan.min_length, plan.max_length) for _ in range(BLOCK))
        write_lines(path, [f"{' '.join(symbols)}\t{value}\n" for symbols, value in expressions])
    return path
