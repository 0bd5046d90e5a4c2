"""Run the tests of the kernels in Triton's interpreter on the CPU.

They run in a separate process: a process interprets all kernels or none, as set when it imported Triton, and with
the interpreter on, every other test on the CPU would use it too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import CHECKOUT
from tests.torch_versions import NEWER_THAN_2_6

FOLDER = Path(__file__).with_name("kernels")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone; there its absence is an error")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER)]
    # Without the check before a kernel's first use, which would run everything twice and has its own test.
    env = {**os.environ, "TRITON_INTERPRET": "1", "LINEARTIME_TRITON": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.strip().splitlines()[-1]
    assert " passed" in summary and ("skipped" not in summary or not NEWER_THAN_2_6), summary
