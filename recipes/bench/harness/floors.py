"""The least time that arithmetic and memory allow on this machine, compared with the measured time."""

from typing import NamedTuple

import torch

from .records import Results
from .work import Case

#: The case that measures the machine, and its two candidates.
RATES, PRODUCT, COPY = "rates", "matrix product", "copy"


class Floor(NamedTuple):
    """One measurement with its floor, in seconds."""

    form: str
    size: int
    run: str
    arithmetic: float
    memory: float
    achieved: float

    @property
    def fraction(self) -> float:
        """The floor, which is the larger of both times, over the achieved time."""
        return max(self.arithmetic, self.memory) / self.achieved


def floors(results: Results, case: Case) -> list[Floor]:
    """The floor of every time of ``case`` whose least work is known; empty if the machine's rates were not measured."""
    speed = {record.form: record.per_second for record in results.timed() if record.case == RATES}
    if case.least_work is None or set(speed) != {PRODUCT, COPY}:
        return []
    itemsize = torch.empty(0, dtype=getattr(torch, results.machine.dtype)).element_size()
    rows = []
    for record in results.timed():
        least = case.least_work(record.form, record.size, record.run) if record.case == case.name else None
        if least is not None:
            arithmetic, memory = least.operations / speed[PRODUCT], least.numbers * itemsize / speed[COPY]
            rows.append(Floor(record.form, record.size, record.run, arithmetic, memory, record.median))
    return rows
