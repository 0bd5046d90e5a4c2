"""Other work on the machine: it is noted before each measurement, and a measurement that it disturbed is repeated."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil

from .timing import quartiles

#: Times are noisy if their quartiles are further apart than this part of their median.
ALLOWED_SPREAD = 0.1
#: A measurement with noisy times is made at most this many times.
MOST_ATTEMPTS = 5
#: It is not repeated once its attempts have taken this many seconds.
MOST_SECONDS = 120.0
#: Seconds of rest before each attempt, in which the load is noted.
REST = 0.5


class Measurement(NamedTuple):
    """The quietest of several attempts to time the same functions."""

    times: list[list[float]]  # seconds, as [function][round]
    load: float  # ``other_load`` before this attempt
    attempts: int  # how many were made

    @property
    def largest_spread(self) -> float:
        """The spread of the function whose times are furthest apart."""
        return max(map(spread, self.times), default=0.0)


def spread(times: Sequence[float]) -> float:
    """How far the quartiles of ``times`` are apart, as a part of their median."""
    low, middle, high = quartiles(times)
    return (high - low) / middle


def other_load() -> float:
    """The share of all cores that other programs use while this one rests for ``REST`` seconds; 0 to 1."""
    process = psutil.Process()
    process.cpu_percent()
    total = psutil.cpu_percent(interval=REST)
    # Threads of this process may wait in a busy loop; a process counts in percent of one core.
    own_share = process.cpu_percent() / (psutil.cpu_count() or 1)
    return round(min(1.0, max(0.0, (total - own_share) / 100)), 3)


def quietest(attempt: Callable[[], list[list[float]]]) -> Measurement:
    """Repeat ``attempt``, which returns [function][round], until none of its times are noisy.

    At most ``MOST_ATTEMPTS`` are made, and none begins after ``MOST_SECONDS``. The attempt whose largest spread is
    smallest is kept.
    """
    measurements: list[Measurement] = []
    started = time.monotonic()
    while not measurements or (len(measurements) < MOST_ATTEMPTS and time.monotonic() - started < MOST_SECONDS):
        load = other_load()
        measurements.append(Measurement(attempt(), load, len(measurements) + 1))
        if measurements[-1].largest_spread <= ALLOWED_SPREAD:
            break
    return min(measurements, key=lambda one: one.largest_spread)._replace(attempts=len(measurements))
