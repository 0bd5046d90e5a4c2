"""Memory that temporary tensors leave behind stays with the process."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from common.ops import flow_attention

def use():
    [torch.ones(2**18) for _ in range(16)]  # 16 MiB, 4,096 pages

x = torch.rand(1, 1, 4, 2, requires_grad=True)
flow_attention(x, x, x, causal=CAUSAL)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the GNU C library")
@pytest.mark.parametrize("causal", [False, True])
def test_pages_are_not_given_back_and_asked_for_again(causal):
    program = [sys.executable, "-c", PROGRAM.replace("CAUSAL", str(causal))]
    faults = int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    assert faults < 4096  # 40,000 without
