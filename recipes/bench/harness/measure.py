"""Run one case at one size: compare with the reference, then time in turns, then measure memory.

A candidate that differs from its reference is not timed; one that fails is recorded with the reason. Times that other
work disturbed are measured again.
"""

import gc
from collections.abc import Sequence

import torch

from .compare import first_unequal
from .memory import peak_beyond
from .noise import quietest
from .records import FAILED, NOT_RUN, TIMED, UNEQUAL, Record
from .timing import interleave, synchronizer
from .work import Absent, Candidate, Case, Settings


def measure(case: Case, size: int, settings: Settings, seed: int = 0) -> list[Record]:
    """The records of every candidate of ``case`` at ``size``: one for each of its runs, or one with the reason."""
    torch.manual_seed(seed)
    records: list[Record] = []
    try:
        _measure(case, size, settings, records)
    except Exception as error:  # an error of any kind must not lose the other cases
        records.append(Record(case.name, size, "", "all", FAILED, _last_line(error)))
    gc.collect()  # modules are reference cycles, and the next case may need all the memory
    return records


def _measure(case: Case, size: int, settings: Settings, records: list[Record]) -> None:
    """Append to ``records`` after each step, so that nothing is lost if a later candidate fails."""
    entries = case.build(settings, size)
    candidates = [candidate for candidate in entries if isinstance(candidate, Candidate)]
    for absent in entries:
        if isinstance(absent, Absent):
            records.append(Record(case.name, absent.size, "", absent.name, NOT_RUN, absent.reason))
    refusals = [_refusal(case, candidate) for candidate in candidates]
    records += [refusal for refusal in refusals if refusal is not None]
    timed = [candidate for candidate, refusal in zip(candidates, refusals) if refusal is None]
    for run in dict.fromkeys(run for candidate in timed for run in candidate.runs):
        records += _timed(case, [candidate for candidate in timed if run in candidate.runs], run, settings)


def _refusal(case: Case, candidate: Candidate) -> Record | None:
    """None if the candidate equals its reference, else the record that replaces its times."""
    unequal = first_unequal(candidate.check())
    if unequal is None:
        return None
    reason = f"{unequal.tensor} differs from the reference by {unequal.error:.2g}; allowed: {unequal.allowed:.2g}"
    return Record(case.name, candidate.size, "", candidate.name, UNEQUAL, reason)


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[-1]}"


def _timed(case: Case, candidates: Sequence[Candidate], run: str, settings: Settings) -> list[Record]:
    functions = [candidate.runs[run] for candidate in candidates]
    measurement = quietest(lambda: interleave(functions, synchronizer(settings.device)))
    peaks = [peak_beyond(function, settings.device) if case.memory else None for function in functions]
    return [
        Record(
            case.name,
            candidate.size,
            run,
            candidate.name,
            TIMED,
            seconds=tuple(seconds),
            units=candidate.units,
            extra_bytes=peak,
            input_bytes=candidate.input_bytes,
            load=measurement.load,
            attempts=measurement.attempts,
        )
        for candidate, seconds, peak in zip(candidates, measurement.times, peaks)
    ]
