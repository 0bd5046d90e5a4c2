"""The least time that arithmetic and memory allow for Flow-Attention, beside what was measured."""

from typing import NamedTuple

import torch

from .cases import flow, rates
from .records import Results
from .work import BACKWARD, FORWARD

#: Case -> products of (C, C) and (C, d), or (C, d) and (d, d), for every C tokens of a head.
_PRODUCTS = {"causal_flow": 4, "causal_flow_cuda": 4, "full_flow": 2}
#: C, which is d too.
_CHUNK = 64


class Floor(NamedTuple):
    """One measurement beside its floor."""

    size: int
    run: str
    arithmetic: float  # seconds
    memory: float
    achieved: float

    @property
    def fraction(self) -> float:
        """How much of the achieved time the larger of both is."""
        return max(self.arithmetic, self.memory) / self.achieved


def floors(results: Results, case: str) -> list[Floor]:
    """A floor for every time of ``flow_attention`` in ``case``; none of other cases or without the machine's rates.

    Arithmetic for C = 64 tokens of a head: kᵀ v and q Σ kᵀv, and causal q kᵀ and (q kᵀ) v inside of their chunk, 2 C² d
    operations each as C = d, and twice that again backward. Memory: q, k, v and the output once; backward q, k, v and
    the output's gradient again, and three gradients.
    """
    speed = {one.form: one.per_second for one in results.timed() if one.case == "rates"}
    if case not in _PRODUCTS or set(speed) != {rates.PRODUCT, rates.COPY}:
        return []
    itemsize = torch.empty(0, dtype=getattr(torch, results.machine.dtype)).element_size()
    found = []
    for one in results.timed():
        if one.case != case or one.form != flow.OURS:
            continue
        tokens = one.size * flow.HEADS
        operations = tokens * _PRODUCTS[case] * 2 * _CHUNK * flow.HEAD_DIM * (3 if one.run == BACKWARD else 1)
        moved = tokens * flow.HEAD_DIM * itemsize * (4 if one.run == FORWARD else 11)
        found.append(
            Floor(one.size, one.run, operations / speed[rates.PRODUCT], moved / speed[rates.COPY], one.median)
        )  # fmt: skip
    return found
