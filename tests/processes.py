"""Where the checkout is, and Python programs in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def run_program(arguments: Sequence[str], stdin: str = "", cwd: str = "") -> str:
    """Run ``python ARGUMENTS`` in a new process and return its output, stderr included; it must succeed."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        cwd=cwd or None,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, f"{' '.join(arguments)}\n{finished.stdout[-3000:]}"
    return finished.stdout
