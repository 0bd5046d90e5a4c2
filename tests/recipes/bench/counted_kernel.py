"""A kernel and operations of PyTorch with work known by hand; prints their counts as JSON.

``test_roofline`` runs this file in a separate process with Triton's interpreter on.
"""

import dataclasses
import json

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, interpreter_builder

from recipes.bench.kernels.counting import counted


@triton.jit
def products(x, out, n, exact: tl.constexpr):
    """Add the first row to each of the n rows of x (n, 16); multiply blocks of 16 rows by their transpose."""
    rows, columns = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, 16)
    inside = (rows < n)[:, None]
    tile = tl.load(x + rows[:, None] * 16 + columns[None, :], mask=inside, other=0.0) + tl.load(x + columns)[None, :]
    if exact:
        result = tl.dot(tile, tl.trans(tile), input_precision="tf32x3")
    else:
        result = tl.dot(tile, tl.trans(tile))
    tl.store(out + rows[:, None] * 16 + columns[None, :], result, mask=inside)


def main() -> None:
    x = torch.ones(40, 16, dtype=torch.float16)
    before = dict(vars(interpreter_builder)), GridExecutor.__call__
    with counted() as work:
        out = torch.empty(40, 16)  # no launch
        products[(3,)](x, out, 40, exact=False)
        products[(3,)](x.float(), out, 40, exact=True)  # reads 1,280 bytes, writes 2,560
        y = x.view(16, 40).t() + x[0, :1].expand(40, 16)  # reads 1,280 and 2, writes 1,280
        y.zero_()  # writes 1,280
        torch.ones_like(y)  # writes 1,280
        y[:, 1] = x[:, 0]  # reads 80, writes 80
    restored = (
        vars(interpreter_builder).keys() == before[0].keys() | {"grid_dim", "grid_idx"}
        and GridExecutor.__call__ is before[1]
    )
    print(json.dumps({**{name: dataclasses.asdict(count) for name, count in work.items()}, "restored": restored}))


if __name__ == "__main__":
    main()
