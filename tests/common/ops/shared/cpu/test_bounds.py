"""Kernels as plain Python with a check of each index and vector, in a process of their own; see ``interpreted``.

Arrays have the sizes that kernels declare; the tests of each mechanism's kernels test that these are inside the memory
that kernels get.
"""

import re

import pytest

from tests.processes import CHECKOUT, run_program

pytest.importorskip("numba")  # without it, no kernel is used

PROGRAM = """
from tests.common.ops.shared.cpu import interpreted
import torch
from common.ops import flow_attention, gated_delta_attention
from common.ops.shared.cpu.sums import causal_sums
from tests.common.ops.shared.cpu.recurrence import GATES, random_inputs

for n, f, e in ((1, 1, 1), (3, 3, 1), (5, 1, 7), (66, 2, 17)):
    for gates in GATES:
        for begun in (False, True):
            phi = ("sigmoid", "elu+1", "relu")[(n + begun) % 3]
            results = causal_sums(*random_inputs(n, f, e, gates, begun, 1, 2), True, (1e-3, 0.5), phi)
            sum(x.sum() for x in results).backward()
for n, d, e in ((1, 1, 1), (1, 6, 17), (3, 3, 1), (5, 1, 7), (66, 2, 5), (6, 17, 17)):
    tokens = [torch.randn(1, 2, n, c, requires_grad=True) for c in (d, d, e)]
    for log_decay in (None, -torch.rand(1, 2, n)):
        for state in (None, {"memory": torch.randn(1, 2, d, e)}):
            inputs = dict(beta=torch.rand(1, 2, n), log_decay=log_decay, initial_state=state)
            gated_delta_attention(*tokens, **inputs).sum().backward()
            with torch.no_grad():
                gated_delta_attention(*tokens, **inputs)
for n, m, d, e in ((1, 2, 1, 1), (5, 3, 3, 17), (9, 34, 2, 1), (35, 6, 17, 33)):
    q, k, v, keys, values = [
        torch.randn(2, 2, t, c, requires_grad=True) for t, c in ((n, d), (n, d), (n, e), (m, d), (m, e))
    ]
    sinks, sources = torch.rand(2, n) < 0.4, torch.rand(2, m) < 0.4
    for masked in (False, True):
        masks = {"query_padding_mask": sinks, "key_padding_mask": sources} if masked else {}
        for options in ({}, {"competition": "softmax_heads", "allocation": "softmax"}):
            flow_attention(q, keys, values, **masks, **options).sum().backward()
        masks = {"query_padding_mask": sinks, "key_padding_mask": sinks} if masked else {}
        for options in ({}, {"competition": "sigmoid", "allocation": "none"}, {"log_decay": -torch.rand(2, 2, n)}):
            options = {**masks, **options, "causal": True, "return_state": True}
            out, state = flow_attention(q, k, v, **options)
            again, after = flow_attention(q, k, v, initial_state=state, **options)
            (out.sum() + again.sum() + after["sum_kv"].sum()).backward()
    with torch.no_grad():
        for initial in (None, flow_attention(q, k, v, causal=True, return_state=True)[1]):
            flow_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True, initial_state=initial)
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
