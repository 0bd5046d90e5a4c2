"""Running cases: compare, then time in turns, then memory. What is unequal is not timed, and what fails says why."""

import gc
from collections.abc import Sequence

import torch

from .compare import first_unequal
from .memory import peak_beyond
from .records import FAILED, NOT_RUN, TIMED, UNEQUAL, Record
from .timing import interleave, synchronizer
from .work import Absent, Case, Form, Settings


def measure(case: Case, size: int, settings: Settings, seed: int = 0) -> list[Record]:
    """Every form of ``case`` at ``size``: one record for each thing that is run of it, or one that says why not."""
    torch.manual_seed(seed)
    records: list[Record] = []
    try:
        _measure(case, size, settings, records)
    except Exception as error:  # whatever it is, the other cases are worth their minutes
        records.append(Record(case.name, size, "", "all forms", FAILED, _last_line(error)))
    gc.collect()  # modules refer to themselves, and the next ones may need all the memory
    return records


def _measure(case: Case, size: int, settings: Settings, records: list[Record]) -> None:
    """Append what is found to ``records``, which keeps it if a later form fails."""
    built = case.build(settings, size)
    forms = [form for form in built if isinstance(form, Form)]
    for absent in built:
        if isinstance(absent, Absent):
            records.append(Record(case.name, absent.size, "", absent.name, NOT_RUN, absent.reason))
    refusals = [_refusal(case, form) for form in forms]
    records += [refusal for refusal in refusals if refusal is not None]
    equal = [form for form, refusal in zip(forms, refusals) if refusal is None]
    for run in dict.fromkeys(run for form in equal for run in form.runs):
        records += _timed(case, [form for form in equal if run in form.runs], run, settings)


def _refusal(case: Case, form: Form) -> Record | None:
    """None if the form is equal to its reference, else what stands in the results in place of its times."""
    found = first_unequal(form.check())
    if found is None:
        return None
    reason = f"{found.tensor} differs from the reference by {found.error:.2g}; allowed: {found.allowed:.2g}"
    return Record(case.name, form.size, "", form.name, UNEQUAL, reason)


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[-1]}"


def _timed(case: Case, forms: Sequence[Form], run: str, settings: Settings) -> list[Record]:
    functions = [form.runs[run] for form in forms]
    times = interleave(functions, synchronizer(settings.device))
    extra = [peak_beyond(function, settings.device) if case.memory else None for function in functions]
    return [
        Record(case.name, form.size, run, form.name, TIMED, "", tuple(seconds), form.units, peak, form.input_bytes)
        for form, seconds, peak in zip(forms, times, extra)
    ]
