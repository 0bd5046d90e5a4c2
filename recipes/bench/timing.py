"""Timing several functions in turns, so that whatever else the machine does is spread over all of them."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

#: Rounds of every group of functions, and how many more a group of short ones gets within the seconds.
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 5, 15, 2.0
#: One measurement repeats a function until it lasts this long, as clocks and the first touch of memory are coarse.
LEAST_SECONDS = 0.01
#: What takes as long as this is warm after one call, and its number of repeats is one whatever the call was worth.
_LONG = 0.5


def interleave(functions: Sequence[Callable[[], object]], synchronize: Callable[[], None]) -> list[list[float]]:
    """Seconds of one call of each function, in rounds: [function][round]. Every second round goes backwards.

    Each is called before the first round, which is not counted.
    """
    if not functions:
        return []
    repeats = []
    for function in functions:
        warm = _seconds(function, 1, synchronize)
        if warm < _LONG:
            warm = _seconds(function, 1, synchronize)
        repeats.append(max(1, round(LEAST_SECONDS / max(warm, 1e-7))))
    found: list[list[float]] = [[] for _ in functions]
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
                found[i].append(_seconds(functions[i], repeats[i], synchronize) / repeats[i])
    finally:
        if enabled:
            gc.enable()
    return found


def _seconds(function: Callable[[], object], repeats: int, synchronize: Callable[[], None]) -> float:
    synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize()
    return time.perf_counter() - started


def synchronizer(device: str) -> Callable[[], None]:
    """What waits until ``device`` has done everything it was asked to."""
    return torch.cuda.synchronize if device == "cuda" else _nothing


def _nothing() -> None:
    """A CPU has finished when a call returns."""


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """How many times as long the peer takes: the median over rounds, which both ran next to each other.

    Raises:
        ValueError: another number of rounds, or none.
    """
    if len(ours) != len(peer) or not ours:
        raise ValueError(f"{len(ours)} and {len(peer)} rounds; allowed: the same number, at least 1")
    return statistics.median(b / a for a, b in zip(ours, peer))
