"""Work and memory that is less than, or grows otherwise than, the contract's bounds for linear mechanisms."""

import os
from functools import partial

import pytest
import torch

from common.ops import (
    bigbird_attention,
    daft_full,
    daft_select,
    flow_attention,
    flow_attention_weights,
    gated_delta_attention,
    gau_attention,
    local_attention,
    mixed_chunk_attention,
    sparse_attention,
    yoso_attention,
)
from common.ops.bigbird import draw_numbers
from recipes.runs import peak_bytes
from tests.common.inputs import qkv
from tests.common.properties import Elements, bytes_kept, largest_tensor
from tests.compare import gradients
from tests.processes import CHECKOUT, run_program


def mixed_chunk(q, k, v, **options):
    return mixed_chunk_attention(q, k, q, k, v, chunk_size=64, **options)


def weights(q, k, v, **options):
    competition, allocation = flow_attention_weights(q, k, **options)
    return competition + allocation + 0 * v.sum(-1)


def of_daft(op, *more, **options):
    """d channels in one head of daft_full, or four heads with a far wider window than the bound."""

    def call(q, k, v):
        keys, values = (x.transpose(1, 2).flatten(2) for x in (k, v))
        return op(None, keys[..., :4] if op is daft_select else keys[..., :32], values, *more, **options)

    return call


def sparse_after(pattern):
    """A long prompt behind a state."""

    def call(q, k, v):
        options = {"pattern": pattern, "stride": 16, "causal": True, "return_state": True}
        _, state = sparse_attention(*(x[:, :, :10] for x in (q, k, v)), **options)
        return sparse_attention(*(x[:, :, 10:] for x in (q, k, v)), initial_state=state, **options)[0]

    return call


INDEX, NUMBERS = torch.tensor([0, 100, 128, 256]), draw_numbers(3, seed=0)
#: What -> (a function of q, k, v of one row, 4 heads and 8 channels; tokens; entries of its largest tensor at most).
LARGEST = {
    "GAU: blocks of 256 rows": (partial(gau_attention, divisor=8.0), 1000, 4 * 256 * 1000),
    "GAU, causal": (partial(gau_attention, divisor=8.0, causal=True), 1000, 4 * 256 * 1000),
    "YOSO: blocks of 256 rows": (yoso_attention, 1000, 4 * 256 * 1000),
    "YOSO, causal": (partial(yoso_attention, causal=True), 1000, 4 * 256 * 1000),
    "weights of flow": (weights, 3000, 4 * 64 * 3063),
    "weights of causal flow": (partial(weights, causal=True), 3000, 4 * 64 * 3063),
    "the first token by softmax": (partial(mixed_chunk, first_softmax=True), 3000, 4 * 64 * 3256),
    "the first ones of chunks": (partial(mixed_chunk, first_to_all=True), 3000, 4 * 64 * 3256),
    "windows": (partial(local_attention, window=128), 1000, 1.6 * 4 * 1000 * 128),
    "causal windows": (partial(local_attention, window=128, causal=True), 1000, 1.6 * 4 * 1000 * 128),
    "fixed sparse": (partial(sparse_attention, stride=32, columns=2), 1024, 4 * 1024 * 5 * 32),
    "strided sparse": (partial(sparse_attention, pattern="strided", stride=32), 1024, 4 * 1024 * 5 * 32),
    "fixed sparse after a state": (sparse_after("fixed"), 600, 4 * 600 * 600 / 2),
    "strided sparse after a state": (sparse_after("strided"), 600, 4 * 600 * 600 / 2),
    "BigBird: the chunks seen": (partial(bigbird_attention, numbers=NUMBERS, chunk_size=16), 800, 4 * 800 * 8 * 16),
    "DAFT-full: no T x T x d": (of_daft(daft_full, torch.zeros(512, 512)), 512, 512 * 512 * 1.01),
    "causal DAFT-full": (of_daft(daft_full, torch.zeros(512, 512), causal=True), 512, 512 * 512 * 1.01),
    "DAFT-select": (of_daft(daft_select, INDEX, torch.zeros(4), window=257), 2000, 40 * 2257),
}


@pytest.mark.parametrize("what", LARGEST)
def test_the_largest_tensor_of_a_training_step(what):
    call, n, most = LARGEST[what]
    inputs = qkv(n, batch=1, heads=4, d=8, e=8, dtype=torch.float32)
    seen = largest_tensor(lambda: gradients(call(*inputs), inputs))
    assert n * 8 <= seen <= most


@torch.no_grad()
@pytest.mark.parametrize(
    "call, factor",
    [
        (lambda n: partial(local_attention, window=n // 8), 4.2),
        (lambda n: partial(local_attention, window=n // 8, causal=True), 4.2),
        (lambda n: partial(sparse_attention, stride=int(n**0.5), columns=2), 2.9),
        (lambda n: partial(sparse_attention, stride=int(n**0.5), pattern="strided", causal=True), 2.9),
    ],
)
def test_work_grows_with_the_window_and_the_root_of_the_length(call, factor):
    """Twice the tokens with twice the window are four times the work, and n √n grows by 2.83."""
    totals = []
    for n in (1024, 2048):
        inputs = [x.detach() for x in qkv(n, batch=1, dtype=torch.float32)]
        with Elements() as counted:
            call(n)(*inputs)
        totals.append(counted.total)
    assert totals[1] < factor * totals[0]


def delta(q, k, v):
    gates = torch.rand(2, *q.shape[:3])
    return gated_delta_attention(q, k, v, beta=gates[0], log_decay=-gates[1])


#: What -> (function, bytes of one head with 2048 tokens and 64 channels beside 12 bytes a channel, kernels or not).
KEPT = {
    "flow: output, five numbers a token, sums": (flow_attention, 4 * (2048 * (64 + 5) + 64 * 68), "01"),
    "causal flow": (partial(flow_attention, causal=True), 4 * (2048 * (64 + 5) + 64 * 68 + 2), "1"),
    "delta rule: six tensors like q": (delta, 6 * 4 * 2048 * 64, "01"),
    "mixed chunks: sums before each": (partial(mixed_chunk, causal=True), 4 * 31 * 64 * 64, "1"),
    "GAU: nothing": (partial(gau_attention, divisor=8.0), 4 * 1024, "1"),
    "YOSO: unit vectors and norms": (yoso_attention, 4 * 2048 * (64 * 4 + 8), "1"),
}


@pytest.mark.parametrize("what, kernels", [(what, kernels) for what, row in KEPT.items() for kernels in row[2]])
def test_what_is_kept_for_the_backward_pass(what, kernels, monkeypatch):
    """The inputs and little more."""
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", kernels)
    call, more, _ = KEPT[what]
    inputs = qkv(2048, batch=1, heads=2, d=64, e=64, dtype=torch.float32)
    assert bytes_kept(lambda: call(*inputs)) <= 2 * (4 * 3 * 2048 * 64 + more)


@pytest.mark.parametrize("causal, length, bound", [(False, 2048, 1.4), (True, 128, 2.0), (True, 1000, 1.6)])
def test_memory_of_a_step_by_kernels_beyond_that_of_the_inputs(causal, length, bound):
    """Output, gradients, and some numbers for each token and head, relative to the inputs."""
    pytest.importorskip("numba")
    inputs = qkv(length, batch=1, heads=8, d=64, e=64, dtype=torch.float32)

    def step():
        out = flow_attention(*inputs, causal=causal)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    step()
    assert 0 < peak_bytes(step) <= bound * sum(x.nbytes for x in inputs)


#: Each call in a child of a process that has imported everything, as a peak never falls: its longer step runs last.
PEAK = """
import os, re, torch
from common.ops import flow_attention, gau_attention

def peak(n, heads, attend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 32, requires_grad=True) for _ in range(3))
    attend(q, k, v).sum().backward()
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read()).group(1))

torch.set_num_threads(1)
for n, *call in ((8192, 4, lambda q, k, v: flow_attention(q, k, v, causal=True)),
                 (2048, 1, lambda q, k, v: gau_attention(q, k, v, divisor=8.0))):
    child = os.fork()
    if child == 0:
        base = peak(64, *call)
        print(*(peak(size, *call) - base for size in (n, 2 * n)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="VmHWM is Linux's")
def test_a_training_step_of_twice_the_tokens_peaks_at_most_2_2_times_as_high():
    """Resident memory above imports and a short step.

    A fixed threshold makes the allocator return every large block at once, so that peaks repeat to within a percent.
    """
    printed = run_program(["-c", PEAK], cwd=str(CHECKOUT), environment={"MALLOC_MMAP_THRESHOLD_": "65536"})
    for line in printed.splitlines():
        half, whole = map(int, line.split())
        assert 0 < half < whole <= 2.2 * half
    assert len(printed.splitlines()) == 2
