"""Bytes, operations and launches of kernels, against counts by hand. In separate processes, which take seconds:
Triton's interpreter is on or off for a whole process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.bench.kernels import roofline
from recipes.bench.kernels.counting import Work

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone; there it must be")


@needs_triton
def test_a_kernel_and_operations_that_are_known_by_hand():
    command = [sys.executable, "-m", "tests.recipes.bench.counted_kernel"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts.pop("restored")
    # 40 rows of 16 numbers are read and written, and each of the 3 programs of a launch reads the first row again.
    rows, first, dots = 40 * 16, 3 * 16, 3 * 2 * 16**3
    moved = rows * (2 + 4) + rows * (4 + 4)
    again = first * (2 + 4)
    operations = 3840 + 2562 + 1280 + 1280 + 160
    assert {name: Work(**count) for name, count in counts.items()} == {
        "products": Work(2, moved + again, moved, dots, 3 * dots),
        "PyTorch": Work(5, operations, operations),
    }


@needs_triton
def test_the_command_counts_a_call(tmp_path):
    """One tile of 64 tokens of two heads, d = e = 32."""
    out = tmp_path / "roofline.md"
    assert roofline.main(["--mechanism", "flow", "--head-size", "32", "--tokens", "64", "--out", str(out)]) == 0
    rows = [line.strip("| ").split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    cells = {(row[0], row[1]): row[2:] for row in rows}
    # q, k, v and the output, 64 bytes each, two weights, and the 32 x 32 sum before the tile; the products
    # are q kᵀ, its product with v for 64 tokens, and q times the sum.
    moved, operations = 4 * 64 + 2 * 4 + 32 * 32 * 4 // 64, 2 * (2 * 64 * 32) + 2 * 32 * 32
    nanoseconds = [f"{moved / rate:.3f} memory" for rate in (2039, 3350)]
    assert cells["forward", "outputs"] == ["1", f"{moved}", f"{moved}", f"{operations:,}", *nanoseconds]
    assert cells["forward", "the least"][:4] == ["1", "256", "256", "4,096"]
    assert cells["backward", "the least"][:4] == ["1", "448", "448", "10,240"]
    for name in ("forward", "backward"):
        launches = [int(row[2]) for row in rows if row[0] == name and row[1] not in ("all", "the least")]
        assert int(cells[name, "all"][0]) == sum(launches) > len(launches) > 3


def test_the_share_of_the_roofline():
    gpu = roofline.Gpu("fast", bytes=10.0, half=100.0, tf32=50.0)
    kernels = {
        "by memory": Work(bytes=90, bytes_once=30, half=100),  # 3 s, or 9 s without caches
        "by products": Work(bytes=10, bytes_once=10, half=100, tf32=150),  # 1 + 3
    }
    forward = roofline.Pass("forward", kernels, Work(bytes=20, bytes_once=20, half=350))  # 3.5
    assert [gpu.bound(work) for work in kernels.values()] == ["memory", "products"]
    assert forward.share(gpu) == 3.5 / 7 and forward.share(gpu, caches=False) == 3.5 / 13
