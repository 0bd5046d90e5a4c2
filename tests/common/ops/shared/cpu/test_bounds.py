"""Kernels with Numba's check of each index, in a process of its own, which compiles them for that.

An index outside an array is an IndexError there. Arrays have the sizes that kernels declare; the tests of each
mechanism's kernels test that these are inside the memory that kernels get.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import CHECKOUT, LIMIT

pytest.importorskip("numba")

SUMS = """
import torch
from common.ops import gated_delta_attention
from common.ops.shared.cpu.sums import causal_sums
from tests.common.ops.shared.cpu.recurrence import GATES, random_inputs

for n, f, e in ((1, 1, 1), (3, 3, 1), (5, 1, 7), (65, 7, 3), (130, 2, 5)):
    for gates in GATES:
        for begun in (False, True):
            for phi in ("sigmoid", "elu+1", "relu"):
                results = causal_sums(*random_inputs(n, f, e, gates, begun), True, (1e-3, 0.5), phi)
                sum(x.sum() for x in results).backward()
for n, d, e in ((1, 1, 1), (3, 3, 1), (5, 1, 7), (65, 7, 3), (130, 17, 5)):
    tokens = [torch.randn(2, 2, n, c, requires_grad=True) for c in (d, d, e)]
    for log_decay in (None, -torch.rand(2, 2, n)):
        for state in (None, {"memory": torch.randn(2, 2, d, e)}):
            inputs = dict(beta=torch.rand(2, 2, n), log_decay=log_decay, initial_state=state)
            gated_delta_attention(*tokens, **inputs).sum().backward()
            with torch.no_grad():
                gated_delta_attention(*tokens, **inputs)
from common.ops.gated_delta.cpu import kernels as delta_kernels
from common.ops.shared.cpu import sums_kernels
kernels = [kernel for x in (sums_kernels, delta_kernels) for kernel in (x.forward, x.step, x.backward)]
"""

FLOW = """
import torch
from common.ops import flow_attention
from common.ops.flow.cpu import backward_kernels, full_backward_kernels, full_kernels
from common.ops.flow.cpu import kernels as causal_kernels
from common.ops.shared.cpu import cumsum_kernels

for n, m, d, e in ((1, 2, 1, 1), (5, 3, 3, 17), (9, 34, 16, 12), (35, 6, 65, 61)):
    q, k, v, keys, values = [
        torch.randn(2, 3, t, c, requires_grad=True) for t, c in ((n, d), (n, d), (n, e), (m, d), (m, e))
    ]
    sinks, sources = torch.rand(2, n) < 0.4, torch.rand(2, m) < 0.4
    for masked in (False, True):
        masks = {"query_padding_mask": sinks, "key_padding_mask": sources} if masked else {}
        for options in ({}, {"competition": "softmax_heads", "allocation": "softmax"}):
            flow_attention(q, keys, values, **masks, **options).sum().backward()
        masks = {"query_padding_mask": sinks, "key_padding_mask": sinks} if masked else {}
        for options in ({}, {"competition": "sigmoid", "allocation": "none"}, {"log_decay": -torch.rand(2, 3, n)}):
            options = {**masks, **options, "causal": True, "return_state": True}
            out, state = flow_attention(q, k, v, **options)
            again, after = flow_attention(q, k, v, initial_state=state, **options)
            (out.sum() + again.sum() + after["sum_kv"].sum()).backward()
    with torch.no_grad():
        for initial in (None, flow_attention(q, k, v, causal=True, return_state=True)[1]):
            flow_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True, initial_state=initial)
kernels = [
    causal_kernels.forward, causal_kernels.step, backward_kernels.backward, full_kernels.forward,
    full_backward_kernels.backward, cumsum_kernels.forward, cumsum_kernels.backward,
]
"""

CHECK = """
from numba import config
print(config.BOUNDSCHECK, all(kernel.signatures for kernel in kernels))
"""


@pytest.mark.parametrize("program", [SUMS, FLOW], ids=["sums and the delta rule", "flow"])
def test_no_index_is_outside_its_array(program: str, tmp_path: Path):
    """The one test that compiles kernels for itself, which takes 25 s for each process."""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["NUMBA_OPT"] = "0"  # compiles faster
    command = [sys.executable, "-c", program + CHECK]
    done = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True"]
