"""Kernels as plain Python with a check of each index and vector, in a process of their own; see ``interpreted``.

Arrays have the sizes that kernels declare, inside of the memory that kernels get: numbers around that must stay.
"""

import re

import pytest

from tests.processes import CHECKOUT, run_program

pytest.importorskip("numba")  # without it, no kernel is used

PROGRAM = """
from tests.common.ops.cpu import interpreted
import math
import torch
from tests.common.inputs import padding
from tests.common.ops.cpu.kernels import ROWS, attend, draw, of_tokens, total

empty, guards = torch.empty, []

def between_guards(*size, **options):
    if options.get("dtype") not in (torch.float32, torch.float64):
        return empty(*size, **options)
    memory = empty(math.prod(size) + 64, **options).fill_(7.0)
    guards.extend([memory[:32], memory[-32:]])
    return memory[32:-32].view(size)

torch.empty = between_guards  # the working memory of a kernel
for i, (name, row) in enumerate(ROWS.items()):
    for n, d, e in ((1, 1, 1), (3, 3, 17), (5, 16, 7), (9, 17, 2), (66, 2, 1)):
        tensors = draw(name, n, d, e, batch=1)
        mask = padding("right", 1, n) if i % 2 and n == 9 else None
        masks = {"key_padding_mask": mask, "query_padding_mask": mask}
        if not row.causal:
            attend(name, tensors, **masks).sum().backward()
            continue
        out, state = attend(name, tensors, return_state=True, **masks)
        again, state = attend(name, tensors, initial_state=state, return_state=True, **masks)
        step, after = attend(name, of_tokens(tensors, slice(1)), initial_state=state, return_state=True)
        (out.sum() + again.sum() + step.sum() + sum(x.sum() for x in after.values())).backward()
        state = {entry: x.detach() for entry, x in state.items()}
        with torch.no_grad():
            attend(name, of_tokens(tensors, slice(1)), initial_state=state)
assert len(guards) > 100 and all((guard == 7.0).all() for guard in guards)
print(*interpreted.called)
"""


def test_no_index_is_outside_its_array():
    called = run_program(["-c", PROGRAM], cwd=str(CHECKOUT)).split()
    files = (CHECKOUT / "common" / "ops").glob("*/cpu/*kernels.py")
    kernels = {
        f"{path.parts[-3]}.cpu.{path.stem}.{name}"
        for path in files
        for name in re.findall(r"^@kernel\ndef (\w+)", path.read_text(), flags=re.MULTILINE)
    }
    assert set(called) == kernels and len(kernels) > 10
