"""Kernels with Numba's check of each index, in a process of its own, which compiles them for that.

An index outside an array is an IndexError there. Arrays have the sizes that kernels declare; ``test_sums.py`` and
``gated_delta/test_kernels.py`` test that these are inside the memory that kernels get.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import CHECKOUT, LIMIT

pytest.importorskip("numba")

PROGRAM = """
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
from numba import config
print(config.BOUNDSCHECK, all(kernel.signatures for module in (sums_kernels, delta_kernels) for kernel in (
    module.forward, module.step, module.backward
)))
"""


def test_no_index_is_outside_its_array(tmp_path: Path):
    """The one test that compiles kernels of sums and of the delta rule for itself, which takes 25 s."""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["NUMBA_OPT"] = "1"  # compiles in two thirds of the time
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True"]
