"""Several torch.distributed processes for one test, over gloo and a file; no port is opened."""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import fork_server

#: Seconds to wait for another process.
PATIENCE = 100


class Processes:
    """Run ``work(rank, *arguments)`` in ``count`` new processes of one group; each prints to a file."""

    def __init__(self, count: int, folder: Path, work: Callable[..., None], *arguments: Any) -> None:
        self._files = [Path(folder, f"{rank}.txt") for rank in range(count)]
        context = fork_server()
        self._processes = [
            context.Process(target=_begin, args=(rank, count, str(folder), work, arguments), daemon=True)
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()

    def wait(self, seconds: float = 3 * PATIENCE) -> Sequence[int | None]:
        """Wait for all processes; the exit status of each, None for one that was stuck and was ended."""
        for process in self._processes:
            process.join(seconds)
        codes = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()
            process.join()
        return codes

    def printed(self) -> list[str]:
        """The output of each process."""
        return [file.read_text(errors="replace") for file in self._files]


def in_processes(count: int, folder: Path, work: Callable[..., None], *arguments: Any) -> None:
    """Run ``work(rank, *arguments)`` in ``count`` new processes of one group, which must succeed."""
    processes = Processes(count, folder, work, *arguments)
    codes = processes.wait()
    assert set(codes) == {0}, "\n".join(text[-2000:] for text in processes.printed())


def _begin(rank: int, count: int, folder: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    output = os.open(Path(folder, f"{rank}.txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # As in a new interpreter: importing fairseq shows messages of every level, of which Numba has thousands.
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=PATIENCE))
    work(rank, *arguments)
    # The group ends with the process. In torch 2.6, destroying it may wait forever: a thread of gloo that frees a
    # tensor needs Python's lock.
