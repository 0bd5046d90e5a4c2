"""Time several functions in turns, so that other load on the machine is spread over all of them."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

#: Every group of functions runs at least ``LEAST_ROUNDS``, and up to ``MOST_ROUNDS`` within ``SECONDS``.
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 5, 15, 2.0
#: One measurement repeats a function until it lasts this long; shorter times are lost in the noise of clocks.
LEAST_SECONDS = 0.01
#: A function that takes this long is warmed up by one call, and never repeated within a measurement.
_LONG = 0.5


def interleave(
    functions: Sequence[Callable[[], object]],
    synchronize: Callable[[], None],
    clock: Callable[[], float] | None = None,
) -> list[list[float]]:
    """Seconds of one call of each function, as [function][round]. Every second round runs in reverse order.

    Before the first round each function is called to warm up, which is not counted. Times are those of ``clock``,
    by default ``time.perf_counter``.
    """
    if not functions:
        return []
    clock = clock or time.perf_counter
    repeats = []
    for function in functions:
        warm = _seconds(function, 1, synchronize, clock)
        if warm < _LONG:
            warm = _seconds(function, 1, synchronize, clock)
        repeats.append(max(1, round(LEAST_SECONDS / max(warm, 1e-7))))
    times: list[list[float]] = [[] for _ in functions]
    order = list(range(len(functions)))
    started = time.perf_counter()
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for done in range(MOST_ROUNDS):
            if done >= LEAST_ROUNDS and time.perf_counter() - started > SECONDS:
                break
            for i in order if done % 2 == 0 else reversed(order):
                times[i].append(_seconds(functions[i], repeats[i], synchronize, clock) / repeats[i])
    finally:
        if enabled:
            gc.enable()
    return times


def _seconds(
    function: Callable[[], object], repeats: int, synchronize: Callable[[], None], clock: Callable[[], float]
) -> float:
    synchronize()
    started = clock()
    for _ in range(repeats):
        function()
    synchronize()
    return clock() - started


def synchronizer(device: str) -> Callable[[], None]:
    """The function that waits until ``device`` has finished all its work."""
    # Work on a CPU is finished when a call returns.
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """How many times as long the peer takes: the median ratio over the rounds, in which both ran in turns.

    Raises:
        ValueError: the numbers of rounds differ or are 0.
    """
    if len(ours) != len(peer) or not ours:
        raise ValueError(f"{len(ours)} and {len(peer)} rounds; allowed: the same number, at least 1")
    return statistics.median(b / a for a, b in zip(ours, peer))
