"""Kernels on a team of threads, compiled once for each dtype: argument types, and the same bits."""

from collections import defaultdict

import pytest
import torch

from common.ops import flow_attention, gated_delta_attention, linear_attention
from common.ops.shared.cpu import threads
from tests.compare import gradients

numba = pytest.importorskip("numba")

TOKENS, CHANNELS = 9, 4
NOT_CAUSAL = "flow, not causal"
ATTENTIONS = {
    NOT_CAUSAL: flow_attention,
    "sums": lambda q, k, v, **options: linear_attention(q, k, v, causal=True, **options),
    "sums, gates by head": lambda q, k, v, **options: linear_attention(
        q, k, v, causal=True, log_decay=-v[..., 0].abs(), **options
    ),
    "sums, gates by channel": lambda q, k, v, **options: linear_attention(
        q, k, v, causal=True, log_decay=-k.abs(), **options
    ),
    "flow": lambda q, k, v, **options: flow_attention(q, k, v, causal=True, **options),
    "flow, no competition": lambda q, k, v, **options: flow_attention(
        q, k, v, causal=True, competition="none", allocation="none", **options
    ),
    "flow, gates": lambda q, k, v, **options: flow_attention(
        q, k, v, causal=True, log_decay=-v[..., 0].abs(), **options
    ),
    "flow, gates by channel": lambda q, k, v, **options: flow_attention(
        q, k, v, causal=True, log_decay=-k.abs(), **options
    ),
    "delta": lambda q, k, v, **options: gated_delta_attention(
        q, k, v, causal=True, beta=v[..., 0].sigmoid(), **options
    ),
    "delta, gates": lambda q, k, v, **options: gated_delta_attention(
        q, k, v, causal=True, beta=v[..., 0].sigmoid(), log_decay=-v[..., 0].abs(), **options
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_gets_arguments_of_the_same_types_in_each_call(dtype, monkeypatch):
    kinds, run = defaultdict(set), threads.run

    def noted(kernel, heads, operations, work_size, like, *arguments):
        assert like.dtype == dtype
        kinds[kernel].add(numba.typeof(arguments))
        run(kernel, heads, operations, work_size, like, *arguments)

    monkeypatch.setattr(threads, "run", noted)
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[0, :3] = padding[1, 5:] = True
    for attention in ATTENTIONS.values():
        q, k, v = (torch.rand(2, 2, TOKENS, CHANNELS, dtype=dtype, requires_grad=True) for _ in range(3))
        for mask in (None, padding):
            attention(q, k, v, key_padding_mask=mask, query_padding_mask=mask).sum().backward()
        if attention is ATTENTIONS[NOT_CAUSAL]:
            continue
        out, state = attention(q, k, v, return_state=True)
        out, state = attention(q, k, v, initial_state=state, return_state=True)
        attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], initial_state=state)
        (out.sum() + sum(x.sum() for x in state.values())).backward()
    assert len(kinds) >= 11, "forward, backward and mostly a step of four kinds of sums"
    assert {kernel.__name__: len(types) for kernel, types in kinds.items() if len(types) > 1} == {}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_number_of_threads_changes_no_bit(name, monkeypatch):
    """With work that is worth several threads, in 10 heads: no multiple of three."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(2, 5, 300, 64, generator=generator).requires_grad_() for _ in range(3)]
    results = []
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        out = ATTENTIONS[name](*inputs)
        results.append((out, *gradients(out, inputs)))
    assert all(map(torch.equal, *results))
