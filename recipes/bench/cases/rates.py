"""The speed of this machine, from which floors are computed: one large matrix product, and copying memory."""

import torch
from torch import Tensor

from ..harness.compare import TOLERANCES, compare
from ..harness.floors import COPY, PRODUCT, RATES
from ..harness.work import FORWARD, Absent, Candidate, Case, Comparison, Settings


def rates(settings: Settings, size: int) -> list[Candidate | Absent]:
    """A product of two (size, size) matrices, counted in operations, and a copy of 16 of them, counted in bytes."""
    generator = torch.Generator().manual_seed(0)
    a, b = (settings.to(torch.randn(size, size, generator=generator)) for _ in range(2))
    source = a.repeat(16, 1)
    target = torch.empty_like(source)

    def product() -> list[Tensor]:
        return [a @ b]

    def copy() -> list[Tensor]:
        return [target.copy_(source)]

    def check_product() -> list[Comparison]:
        rows = product()[0][:: size // 8]
        return [compare("product", rows, a[:: size // 8].double() @ b.double(), TOLERANCES[settings.dtype])]

    def check_copy() -> list[Comparison]:
        return [compare("copy", copy()[0], source, 0.0)]

    moved = 2 * source.numel() * source.element_size()  # read and written
    return [
        Candidate(PRODUCT, size, 2 * size**3, {FORWARD: product}, check_product),
        Candidate(COPY, size, moved, {FORWARD: copy}, check_copy),
    ]


CASES = (
    Case(
        RATES,
        "Rates of this machine",
        "operations or bytes",
        "rows",
        (2048,),
        (1024,),
        rates,
        memory=False,
        plotted=False,
        note="a matrix product in floating-point operations per second, a copy in bytes read and written per second",
    ),
)
