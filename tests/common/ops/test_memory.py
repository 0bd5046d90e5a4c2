"""Memory of the linear forms grows in proportion to the length, and no tensor of size n x n is created."""

import os
import subprocess
import sys

import pytest
import torch

from common.ops import (
    flow_attention_weights,
    gau_attention,
    mixed_chunk_attention,
)
from tests.common.inputs import qkv
from tests.common.properties import LargestTensor

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def largest(op, n: int, **options) -> int:
    inputs = qkv(n, batch=1, heads=1, d=8, e=8, dtype=torch.float32)
    with LargestTensor() as seen:
        out = op(*inputs, **options)
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(out.sum(), inputs)
    return seen.numel


def test_the_watch_sees_a_quadratic_tensor():
    quadratic = largest(torch.nn.functional.scaled_dot_product_attention, 500, attn_mask=torch.ones(500, 500).bool())
    assert quadratic >= 500 * 500


@causality
def test_looking_at_the_weights_is_linear_too(causal):
    def weights(q, k, v, **options):
        competition, allocation = flow_attention_weights(q, k, **options)
        return competition + allocation + 0 * v.sum(-1)

    assert largest(weights, 5000, causal=causal) <= 64 * 5063


PEAK = """
import re, torch
from common.ops import flow_attention, gau_attention

def peak(n):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, {heads}, n, 32, requires_grad=True) for _ in range(3))
    {call}.sum().backward()
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read()).group(1))

torch.set_num_threads(1)
base = peak(64)
print(*(peak(n) - base for n in {lengths}))
"""


STEPS = {
    "flow": (4, "flow_attention(q, k, v, causal=True)", (16384, 32768)),
    "gau": (1, "gau_attention(q, k, v, divisor=8.0)", (2048, 4096)),
}


@pytest.mark.parametrize("op", STEPS)
def test_a_training_step_of_twice_the_tokens_peaks_at_most_2_2_times_as_high(op):
    """Resident memory above imports and a short step; the longer step runs last, as peaks never fall.

    Uses Linux's VmHWM, since a new process inherits the ru_maxrss of its parent.
    """
    heads, call, lengths = STEPS[op]
    code = PEAK.replace("{heads}", str(heads)).replace("{call}", call).replace("{lengths}", str(lengths))
    # A fixed threshold makes the allocator return every large block at once, so that peaks repeat to within a percent.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    half, whole = map(int, done.stdout.split())
    assert 0 < half < whole <= 2.2 * half


def gau(q, k, v, **options):
    return gau_attention(q, k, v, divisor=8.0, **options)


@causality
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_gau_attention_makes_blocks_of_256_rows_and_nothing_larger(masked, causal):
    for n in (500, 1000, 3000):
        mask = (torch.arange(n) < n // 3)[None] if masked else None
        assert largest(gau, n, causal=causal, key_padding_mask=mask) <= 256 * n


@pytest.mark.parametrize("form", ["first_softmax", "first_to_all"])
def test_first_tokens_that_see_more_make_little_more(form):
    """With ``first_to_all`` a score of each chunk's first token to every token, n² / C of them; the contract has the
    rest of mixed chunk attention.
    """

    def attend(q, k, v):
        return mixed_chunk_attention(q, k, q, k, v, chunk_size=64, **{form: True})

    for n in (1000, 5000):
        most = 64 * (n + 4 * 64)  # scores inside chunks, and sums of chunks
        assert largest(attend, n) <= (max(most, (n + 64) ** 2 / 64) if form == "first_to_all" else most)
