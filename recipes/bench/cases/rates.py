"""What the machine can do: the rate of one large matrix product and of copying memory, of which floors are made."""

import torch
from torch import Tensor

from ..compare import TOLERANCES, compare
from ..work import FORWARD, Absent, Case, Comparison, Form, Settings

PRODUCT, COPY = "matrix product", "copy"


def rates(settings: Settings, size: int) -> list[Form | Absent]:
    """A product of two (size, size) matrices, in units of operations, and a copy of 16 of them, in bytes."""
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
        Form(PRODUCT, size, 2 * size**3, {FORWARD: product}, check_product),
        Form(COPY, size, moved, {FORWARD: copy}, check_copy),
    ]


CASES = (
    Case(
        "rates",
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
