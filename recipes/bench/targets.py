"""Performance targets, one row each, and their verdicts.

A row names a case, a run, a size, two candidates, a figure that compares them, and the number to reach. If no number
can be set, the row names a bound of the figure, and its verdict says which share of the bound is reached. Noisy times
are not judged.
"""

from collections.abc import Callable
from typing import NamedTuple

from .cases import CASES, forgetting, images, language_models, operations, prompts, short_inputs, translation
from .harness.floors import RATES, floors
from .harness.records import Record, Results
from .harness.work import BACKWARD, DECODING, FORWARD, TRAINING

#: A figure; as the bound of a target: the figure if the candidate's time were its floor.
FLOOR = "floor"
#: Whether a target was reached; for a target with a bound, its share replaces ``YES`` and ``NO``.
YES, NO, NOT_MEASURED, NOISY = "yes", "no", "-", "not judged: noisy"


class Target(NamedTuple):
    """One row of the table."""

    case: str
    run: str
    size: int
    candidate: str
    peer: str  # the candidate to compare with; "" for a figure of one candidate
    figure: str  # a key of FIGURES
    #: The number to reach; with ``FLOOR`` or a candidate: the figure if our candidate took the time of that.
    bound: float | str
    peer_size: int | None = None  # if the peer has another size, such as one of the same candidate

    @property
    def place(self) -> str:
        """The run and the size in words."""
        return f"{self.run}, {CASES[self.case].axis}: {self.size:,}"

    @property
    def beside(self) -> str:
        """The candidate to compare with, in words, and its size if that differs."""
        size = "" if self.peer_size is None else f" at {self.peer_size:,}"
        return f"{'itself' if self.peer == self.candidate else self.peer}{size}"


class Verdict(NamedTuple):
    """One line of the report, in words."""

    case: str
    candidate: str
    place: str  # run and size
    beside: str
    reach: str
    achieved: str
    reached: str  # YES, NO, NOT_MEASURED, NOISY or a share of the bound


class Figure(NamedTuple):
    """A number that is read off the results."""

    measure: Callable[[Results, Target], float | None]  # None: it was not measured
    at_most: bool  # whether the bound is the largest allowed number or the smallest
    reach: str  # the bound in words
    achieved: str = "{:.3g} times"
    of_times: bool = True  # False for memory, which other work on the machine does not change
    onwards: bool = False  # whether it reads all sizes from the target's on


def _speed(results: Results, target: Target) -> float | None:
    """How many times as long the peer takes."""
    size = target.peer_size or target.size
    return results.ratio(target.case, target.size, target.run, target.candidate, target.peer, size)


def _time(results: Results, target: Target) -> float | None:
    """The candidate's time over the peer's."""
    speed = _speed(results, target)
    return None if speed is None else 1 / speed


def _time_onwards(results: Results, target: Target) -> float | None:
    """The candidate's time over the peer's, the largest from the target's size on."""
    sizes = [size for size in results.sizes(target.case, target.run, target.candidate) if size >= target.size]
    times = [_time(results, target._replace(size=size)) for size in sizes]
    return None if not times or None in times else max(times)


def _memory(results: Results, target: Target) -> float | None:
    """The candidate's peak memory over the peer's."""
    record = results.find(target.case, target.size, target.run, target.candidate)
    peer_record = results.find(target.case, target.peer_size or target.size, target.run, target.peer)
    return None if record is None or peer_record is None else record.extra_bytes / peer_record.extra_bytes


def _memory_of_inputs(results: Results, target: Target) -> float | None:
    """Peak memory over the bytes of q, k and v, the largest of all sizes; None unless the target's was measured."""
    sizes = results.sizes(target.case, target.run, target.candidate)
    if target.size not in sizes:
        return None
    rows = [results.find(target.case, size, target.run, target.candidate) for size in sizes]
    return max(row.extra_bytes / row.input_bytes for row in rows)


def _gain(results: Results, target: Target) -> float | None:
    """The speed compared with the peer at the target's size, over that at ``peer_size``."""
    large = results.ratio(target.case, target.size, target.run, target.candidate, target.peer)
    small = results.ratio(target.case, target.peer_size, target.run, target.candidate, target.peer)
    return None if large is None or small is None else large / small


def _break_even(results: Results, target: Target) -> float | None:
    """The shortest length from which on the candidate is as fast as the peer; infinite if there is none.

    None unless the target's size and one at least twice as large were measured: a shorter run does not show whether it
    stays faster.
    """
    sizes = results.sizes(target.case, target.run, target.candidate)
    if target.size not in sizes or sizes[-1] < 2 * target.size:
        return None
    shortest = float("inf")
    for size in reversed(sizes):
        ratio = results.ratio(target.case, size, target.run, target.candidate, target.peer)
        if ratio is None or ratio < 1.0:
            break
        shortest = size
    return shortest


def _floor(results: Results, target: Target) -> float | None:
    """The floor over the achieved time, the smallest from the target's size on."""
    return min((share for size, share in _floors(results, target).items() if size >= target.size), default=None)


def _floors(results: Results, target: Target) -> dict[int, float]:
    """Size -> the floor over the candidate's time."""
    rows = floors(results, CASES[target.case])
    return {row.size: row.fraction for row in rows if (row.form, row.run) == (target.candidate, target.run)}


FIGURES = {
    "speed": Figure(_speed, False, "at least {:g} times as fast"),
    "gain": Figure(_gain, False, "at least {:g} times the speedup at the smaller size"),
    "time": Figure(_time, True, "at most {:g} times the time"),
    "time onwards": Figure(_time_onwards, True, "at most {:g} times the time from there on", onwards=True),
    "memory": Figure(_memory, True, "at most {:g} times the memory", of_times=False),
    "memory of inputs": Figure(_memory_of_inputs, True, "at most {:g} times the memory, at any size", of_times=False),
    "break-even": Figure(_break_even, True, "as fast from {:,.0f} on", "from {:,.0f} on", onwards=True),
    FLOOR: Figure(_floor, False, "at least {:g} of the speed", onwards=True),
}

_FLOW, _SOFTMAX, _AUTHORS = operations.FLOW, operations.SOFTMAX, operations.AUTHORS
_FLASH, _FUSED = language_models.TRAINED
_NEAR, _FAR = language_models.NEAR, language_models.FAR
_LAST = translation.at_position(translation.POSITIONS[-1])
_SOURCES = (translation.NEAR, translation.FAR)
TARGETS = tuple(
    Target(*row)
    for row in (
        ("causal_flow", FORWARD, 2048, _FLOW, _AUTHORS, "speed", FLOOR),
        ("causal_flow", FORWARD, 16384, _FLOW, _SOFTMAX, "speed", 35),
        ("causal_flow", BACKWARD, 16384, _FLOW, _SOFTMAX, "speed", 40),
        *(
            (case, BACKWARD, size, name, _SOFTMAX, "time", limit)
            for case in ("short_inputs", "short_inputs_batch")
            for name, limits in short_inputs.LIMITS.items()
            for size, limit in limits.items()
        ),
        ("full_flow", BACKWARD, operations.VIT, _FLOW, _SOFTMAX, "break-even", operations.VIT),
        ("causal_flow_compiled", BACKWARD, 256, operations.COMPILED, _SOFTMAX, "speed", 0.8),
        ("causal_flow", BACKWARD, 16384, _FLOW, "q, k and v", "memory of inputs", 3),
        ("causal_flow", BACKWARD, 16384, _FLOW, _FLOW, "memory", 2.1, 8192),
        ("full_flow", BACKWARD, 4096, _FLOW, _AUTHORS, "speed", 3),
        ("full_flow", BACKWARD, 4096, _FLOW, _AUTHORS, "memory", 0.5),
        ("decoding", DECODING, _FAR, "flowformer_lm", "flowformer_lm", "time", 1.1, _NEAR),
        ("decoding", DECODING, _FAR, "flash_lm", "flash_lm", "time", 1.1, _NEAR),
        ("decoding", DECODING, _FAR, "flowformer_lm", "transformer_lm", "speed", 5),
        ("decoding", DECODING, _FAR, "flash_lm", "transformer_lm", "speed", 5),
        *(
            (case, DECODING, _NEAR, name, language_models.STOCK, "speed", 1)
            for case in ("decoding", "beam_decoding")
            for name in language_models.DECODED[:-1]
        ),
        *(
            ("prompts", prompts.GENERATION, prompts.LENGTH, f"{name}, one pass", f"{name}, token by token", "speed", 20)
            for name in prompts.ARCHITECTURES
        ),
        *(("forgetting", TRAINING, 2048, name, forgetting.LINEAR, "time onwards", 2) for name in forgetting.FORGETTING),
        *(
            ("translation_decoding", _LAST, _SOURCES[1], form, form, "time", 1.1, _SOURCES[0])
            for form in translation.FLAT
        ),
        ("flash_lm_256", TRAINING, 8192, _FLASH, _FUSED, "time", FLOOR),
        ("flash_lm_512", TRAINING, 8192, _FLASH, _FUSED, "time", FLOOR),
        ("hier", TRAINING, 224, images.HIERARCHICAL, images.AUTHORS, "speed", images.NO_ATTENTION),
        ("deit", TRAINING, 512, images.FLOW, images.SOFTMAX, "speed", 1),
        ("deit", TRAINING, 1024, images.FLOW, images.SOFTMAX, "gain", 1, 512),
        ("daft_conv", FORWARD, 4096, operations.DAFT, operations.DIRECT, "speed", 3),
        ("daft_conv", BACKWARD, 4096, operations.DAFT, operations.DIRECT, "speed", 3),
        ("causal_flow_cuda", FORWARD, 8192, _FLOW, "memory or matrix floor", "floor", 0.5),
        ("causal_flow_cuda", BACKWARD, 8192, _FLOW, "memory or matrix floor", "floor", 0.5),
        ("flash_lm_cuda", TRAINING, 8192, _FLASH, _FUSED, "time", 0.6),
        ("flash_lm_cuda", TRAINING, 131072, _FLASH, _FUSED, "time", 0.083),
    )
)


def device_of(target: Target) -> str:
    """The device that a target is for: the CPU, unless its case runs on a GPU alone."""
    return "cpu" if "cpu" in CASES[target.case].devices else "cuda"


def judge(results: Results, target: Target) -> Verdict:
    """Whether ``target`` was reached, or how much of its bound."""
    figure, bounded = FIGURES[target.figure], isinstance(target.bound, str)
    number = figure.measure(results, target)
    goal = _bound(results, target, number) if bounded else target.bound
    if bounded:
        reach = "the bound: " + ("not measured" if goal is None else figure.achieved.format(goal))
    else:
        reach = figure.reach.format(goal)
    if number is None:
        return _verdict(target, reach, "not measured", NOT_MEASURED)
    if figure.of_times and any(record.noisy for record in _read(results, target)):
        answer = NOISY
    elif goal is None:
        answer = NOT_MEASURED
    elif bounded:
        answer = f"{goal / number if figure.at_most else number / goal:.2f} of the bound"
    else:
        answer = YES if (number <= goal if figure.at_most else number >= goal) else NO
    return _verdict(target, reach, figure.achieved.format(number), answer)


def _verdict(target: Target, *texts: str) -> Verdict:
    return Verdict(target.case, target.candidate, target.place, target.beside, *texts)


def _bound(results: Results, target: Target, number: float | None) -> float | None:
    """The figure if the candidate took the time of its floor or of another candidate; None if that is not known."""
    figure = FIGURES[target.figure]
    if target.bound != FLOOR:
        return figure.measure(results, target._replace(candidate=target.bound))
    share = _floors(results, target).get(target.size)
    if number is None or share is None:
        return None
    return number * share if figure.at_most else number / share


def _read(results: Results, target: Target) -> list[Record]:
    """The times that the verdict on ``target`` depends on."""
    figure, names = FIGURES[target.figure], (target.candidate, target.peer, target.bound)
    return [
        record
        for record in results.timed()
        if ((record.case, record.run) == (target.case, target.run) and record.form in names)
        and (record.size in (target.size, target.peer_size) or (figure.onwards and record.size > target.size))
        or (record.case == RATES and FLOOR in (target.figure, target.bound))
    ]


def verdicts(results: Results) -> list[Verdict]:
    """The verdict on every target of the cases and the device of ``results``."""
    device = "cpu" if results.machine.device == "CPU" else "cuda"
    cases = {record.case for record in results.records}
    return [judge(results, target) for target in TARGETS if target.case in cases and device_of(target) == device]
