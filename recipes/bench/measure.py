"""Compare what does the same work: each candidate is checked against a reference, then all are timed in turns."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runs import peak_bytes

#: The allowed ||actual - expected|| / ||expected|| of an operation's output and gradients, and of a model's.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
ALLOWED_OF_MODELS = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
#: A measurement has 5 to 15 rounds and ends after two seconds. It is repeated, up to five times and for two minutes,
#: while the quartiles of one candidate are further apart than a tenth of its median.
ROUNDS, SECONDS, ATTEMPTS, PATIENCE, NOISY = (5, 15), 2.0, 5, 120.0, 0.1

FORWARD, BACKWARD, TRAINING, DECODING = "forward", "forward + backward", "training step", "decoding step"


class Place(NamedTuple):
    """Where candidates run: a device, and the dtype of their floating-point numbers."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __call__(self, x: Any) -> Any:
        """Move a tensor or a module there."""
        floats = isinstance(x, nn.Module) or x.is_floating_point()
        return x.to(self.device, self.dtype) if floats else x.to(self.device)

    def wait(self) -> None:
        """Wait until the device has finished all its work; on a CPU it has when a call returns."""
        if self.device == "cuda":
            torch.cuda.synchronize()


class Candidate(NamedTuple):
    """One implementation or model: its runs by name, which return tensors, and its errors relative to a reference."""

    name: str
    units: float = 1  # tokens or images of a run
    runs: dict[str, Callable[[], Sequence[Tensor]]] = {}
    check: Callable[[], dict[str, float]] = dict  # tensor -> error
    size: int = 0  # if a case times several sizes in the same rounds
    absent: str = ""  # why it cannot run
    is_model: bool = False


class Case(NamedTuple):
    """Candidates at several sizes; ``build`` makes them for a size and a place."""

    title: str
    sizes: Sequence[int]
    build: Callable[[int, Place], list[Candidate]]
    base: str = ""  # the candidate that all times are compared with
    quick: int = 0  # the size of --quick, by default the first one
    axis: str = "tokens"  # what a size counts
    unit: str = "tokens"  # what ``units`` counts
    devices: Sequence[str] = ("cpu", "cuda")


def random(place: Place, *shapes: Sequence[int]) -> list[Tensor]:
    """Normal random leaves that require gradients; the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    return [place(torch.randn(*shape, generator=generator)).requires_grad_() for shape in shapes]


def runs_of(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, Callable]:
    """``function(*inputs)`` forward, and forward with backward to all of ``inputs``, which are leaves."""
    with torch.no_grad():
        weights = torch.randn_like(function(*inputs))

    def backward() -> Sequence[Tensor]:
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, weights, materialize_grads=True)]

    return {FORWARD: torch.no_grad()(lambda: [function(*inputs)]), BACKWARD: backward}


def error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; infinite if a number is not finite or the shapes differ."""
    if actual.shape != expected.shape or not (actual.isfinite().all() and expected.isfinite().all()):
        return math.inf
    difference = (actual.double() - expected.double()).norm().item()
    return difference / (expected.double().norm().item() or 1.0)


def compared(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    heads: int | None = None,
) -> dict[str, float]:
    """Errors of the output and of every gradient of ``function``, relative to ``reference``, which gets float64.

    ``heads``: the reference computes only this many last heads, dimension 1 of every tensor; heads are independent.
    """

    def part(x: Tensor) -> Tensor:
        return x.detach() if heads is None else x.detach()[:, -heads:]

    out = function(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    actual = [out, *torch.autograd.grad(out, inputs, weights, materialize_grads=True)]
    doubles = [part(x).double().requires_grad_() for x in inputs]
    out = reference(*doubles)
    expected = [out, *torch.autograd.grad(out, doubles, part(weights).double(), materialize_grads=True)]
    names = ["output", *(f"gradient of input {i}" for i in range(len(inputs)))]
    return {name: error(part(x), y.detach()) for name, x, y in zip(names, actual, expected, strict=True)}


def differs(candidate: Candidate, dtype: torch.dtype) -> str:
    """The tensor of a candidate that is furthest from its reference, if it is too far; else an empty text."""
    errors, allowed = candidate.check(), (ALLOWED_OF_MODELS if candidate.is_model else ALLOWED)[dtype]
    if not errors:
        raise ValueError(f"{candidate.name} is compared with nothing")
    worst = max(errors, key=errors.get)
    if errors[worst] <= allowed:
        return ""
    return f"{worst} differs from the reference by {errors[worst]:.2g}; allowed: {allowed:.2g}"


def in_turns(functions: Sequence[Callable], wait: Callable[[], None], quick: bool) -> list[list[float]]:
    """Seconds of each function by round; every second round runs in reverse order."""

    def seconds(function: Callable, repeats: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            function()
        wait()
        return (time.perf_counter() - started) / repeats

    repeats = []
    for function in functions:  # the first call warms up; one that takes long is not called once more
        warm = seconds(function, 1)
        repeats.append(max(1, round(0.01 / (warm if warm > 0.5 else seconds(function, 1)))))
    times, started = [[] for _ in functions], time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for done in range(2 if quick else ROUNDS[1]):
            if done >= ROUNDS[0] and time.perf_counter() - started > SECONDS:
                break
            for i in range(len(functions))[:: -1 if done % 2 else 1]:
                times[i].append(seconds(functions[i], repeats[i]))
    finally:
        gc.enable()
    return times


def spread(times: Sequence[float]) -> float:
    """How far the quartiles are apart, as a part of the median."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle


def quietest(functions: Sequence[Callable], wait: Callable[[], None], quick: bool) -> list[list[float]]:
    """``in_turns``, repeated while other programs disturb it."""
    attempts, started = [], time.perf_counter()
    while True:
        times = in_turns(functions, wait, quick)
        attempts.append((max(map(spread, times)), times))
        noise, best = min(attempts)
        if noise <= NOISY or quick or len(attempts) == ATTEMPTS or time.perf_counter() - started > PATIENCE:
            return best


def measure(case: Case, size: int, place: Place, quick: bool) -> list[dict]:
    """A record of each run of each candidate of a case at one size, or of why there is none."""
    rows, candidates = [], []
    for candidate in case.build(size, place):
        if reason := candidate.absent or differs(candidate, place.dtype):
            rows.append({"candidate": candidate.name, "size": candidate.size or size, "reason": reason})
        else:
            candidates.append(candidate)
    for run in dict.fromkeys(run for candidate in candidates for run in candidate.runs):
        chosen = [candidate for candidate in candidates if run in candidate.runs]
        times = quietest([candidate.runs[run] for candidate in chosen], place.wait, quick)
        bases = {one.size: seconds for one, seconds in zip(chosen, times) if one.name == case.base}
        for one, seconds in zip(chosen, times):
            low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
            record = {"candidate": one.name, "size": one.size or size, "run": run, "ms": 1e3 * median}
            record |= {"low": 1e3 * low, "high": 1e3 * high, "noisy": spread(seconds) > NOISY}
            if one.size in bases:  # the median over the rounds, in which both ran in turns
                record["times"] = statistics.median(a / b for a, b in zip(seconds, bases[one.size]))
            rows.append(
                record | {"per second": one.units / median, "MiB": peak_bytes(one.runs[run], place.device) / 2**20}
            )
    return rows
