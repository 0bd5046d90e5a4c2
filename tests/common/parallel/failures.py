"""Multi-process training in which one process fails."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from common.attention import build_attention
from common.ops.shared.cpu.dispatch import VARIABLE
from common.parallel import ContextGroup, context_parallel

#: Rank that fails, out of three.
FAILING = 1
#: Timeout in seconds of the other processes, and how long the failing one sleeps.
TIMEOUT, SLEEP = 3, 8


def one_fails(rank: int, how: str) -> None:
    """Train without end; in the second step, one process is killed, raises an error, or sleeps."""
    os.environ[VARIABLE] = "0"  # each process would load kernels for a second
    group = ContextGroup(dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT if how == "sleeps" else 100)))
    attention = build_attention("flow", causal=True)
    q = torch.randn(1, 2, 50, 8, requires_grad=True)
    everyone = ContextGroup(together="train together")
    for step in range(1000):
        with context_parallel(attention, group, torch.tensor([50])):
            if rank == FAILING and step == 1 and how != "is killed after its step":
                _fail(how)
            attention(q, q, q).sum().backward()
        if rank == FAILING and step == 1:
            _fail(how)
        everyone.meet(q.device)


def _fail(how: str) -> None:
    if how.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise KeyError("a mistake of its own")
    time.sleep(SLEEP)
