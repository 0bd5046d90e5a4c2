"""Random ListOps expressions in blocks that several processes write, each from a random generator of its own."""

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

#: Expressions that one generator draws: a piece of work, and what an interruption may lose.
BLOCK = 500
#: Blocks in a row without a new expression, after which there are too few of them.
_PATIENCE = 5


class Plan(NamedTuple):
    """Settings of the expressions to generate. Two folders with the same plan have the same bytes."""

    seed: int
    train: int
    valid: int
    test: int
    min_length: int  # every expression has more symbols
    max_length: int  # and fewer than this


def check_plan(plan: Plan) -> None:
    """Raise ValueError unless there is an expression of the lengths of ``plan``: of 1 symbol, or of any from 4 on."""
    shortest = 1 if plan.min_length < 1 else max(plan.min_length + 1, 4)
    if shortest >= plan.max_length:
        raise ValueError(
            f"--min-length is {plan.min_length} and --max-length {plan.max_length}; allowed: lengths between which "
            f"expressions lie, so with this --min-length a --max-length of at least {shortest + 1}"
        )


def distinct_lines(plan: Plan, folder: Path, total: int, processes: int) -> Iterator[str]:
    """Yield ``total`` different lines "symbols TAB value", always the same ones for the same plan.

    The blocks stay in ``folder``, from which the next call takes them.

    Raises:
        ValueError: there are not so many different expressions.
    """
    seen: set[bytes] = set()
    without_new = 0
    with contextlib.closing(_blocks(plan, folder, total, processes)) as blocks:
        for path in blocks:
            before = len(seen)
            for line in read_lines(path):
                digest = hashlib.blake2b(line.encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield line
                    if len(seen) == total:
                        return
            without_new = without_new + 1 if len(seen) == before else 0
            if without_new == _PATIENCE:
                raise ValueError(
                    f"--train, --valid and --test ask for {total:,} different expressions; allowed: about "
                    f"{len(seen):,}, all that were found with --min-length {plan.min_length} and --max-length "
                    f"{plan.max_length}"
                )


def _blocks(plan: Plan, folder: Path, total: int, processes: int) -> Iterator[Path]:
    """Block after block, without end."""
    folder.mkdir(parents=True, exist_ok=True)
    make = partial(_make_block, plan, folder)
    planned = -(-total // BLOCK)
    # Forked: a new interpreter would import the recipe, and torch with it.
    with multiprocessing.get_context("fork").Pool(min(processes, planned), _end_with, (os.getpid(),)) as pool:
        yield from pool.imap(make, range(planned))
    yield from map(make, itertools.count(planned))  # in place of expressions that came twice


def _end_with(parent: int) -> None:
    """End this process when ``parent`` does, by kill -9 too: its workers would hold the folder, and work on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_block(plan: Plan, folder: Path, number: int) -> Path:
    """Write one block, unless it is there."""
    path = folder / f"{number:06d}.tsv"
    if not path.exists():
        # Python's random takes a string as a seed, the same on every machine.
        rng = random.Random(f"ListOps {plan.seed} {number}")
        drawn = (draw(rng, plan.min_length, plan.max_length) for _ in range(BLOCK))
        write_lines(path, [f"{' '.join(symbols)}\t{value}\n" for symbols, value in drawn])
    return path
