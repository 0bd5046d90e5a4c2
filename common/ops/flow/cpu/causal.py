"""Causal Flow-Attention by kernels for CPUs, as an operator of PyTorch."""

from typing import Any

import torch
from torch import Tensor

from ...shared.chunks import CHUNK_SIZE
from ...shared.cpu import dispatch, threads
from ...shared.cpu.operators import kernel_operator
from ...shared.cpu.tensors import contiguous_channels, empty_like, rows
from ...shared.precision import autocast_off
from ...shared.state import State
from ..causal import STATE_SUMS, CausalInputs, attention_in_chunks, state_shapes
from ..options import FlowOptions
from . import KEPT
from .arguments import SCHEMA, addresses, constants_of, kernel_options, options_of, real_tokens

_NO_SUMS = [None] * len(STATE_SUMS)


def applies(inputs: CausalInputs) -> bool:
    """Whether these inputs, in the dtype of their sums, can go through kernels."""
    if inputs.state is None:
        return dispatch.applies(inputs.q, inputs.k, inputs.v)
    # All sums have one dtype and device. Only in forward mode may one be special.
    names = STATE_SUMS if torch.autograd.forward_ad._current_level >= 0 else ("sum_kv",)
    return dispatch.applies(inputs.q, inputs.k, inputs.v, *(inputs.state[name] for name in names))


def causal_attention(inputs: CausalInputs) -> tuple[Tensor, State]:
    """``attention_in_chunks``, but in O(n) memory in addition to inputs, output and gradients: there are no chunks.

    Kept for a backward pass: inputs, output, the sums before, and five numbers for each token and head.
    """
    q, k, v, padding, options, _, state = inputs
    count, sums = (None, _NO_SUMS) if state is None else (state["count"], [state[name] for name in STATE_SUMS])
    out, *sums = _operator(q, k, v, padding, count, *sums, *constants_of(options))
    if count is None:
        count = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    count = count + (q.shape[2] if padding is None else (~padding).sum(1))
    # In the order of plain PyTorch: torch.compile of torch 2.6 compiles again for another.
    return out, {"count": count, **dict(zip(STATE_SUMS, sums))}


def step(q: Tensor, k: Tensor, v: Tensor, options: FlowOptions, state: State) -> tuple[Tensor, State]:
    """``causal_attention`` of one token for which ``applies`` was asked before, without gradients."""
    count = state["count"]
    tensors, constants = (q, k, v, None, count, *[state[name] for name in STATE_SUMS]), constants_of(options)
    outputs = _allocate(*tensors, *constants)
    _forward(tensors, constants, outputs)
    return outputs[0], {"count": count + 1, **dict(zip(STATE_SUMS, outputs[1:]))}


def _allocate(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, count: Tensor | None, *rest: Any) -> tuple:
    if count is None:
        shapes = state_shapes(q, v)
        after = [q.new_empty(shapes[name]) for name in STATE_SUMS]
    else:
        after = [torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape) for x in rest[: len(STATE_SUMS)]]
    return empty_like(v), *after, q.new_empty(*q.shape[:3], KEPT)


def _forward(inputs: tuple, constants: tuple, outputs: tuple) -> None:
    from . import kernels

    (heads, operations, sizes, *arguments), _tensors = _arguments(inputs, constants)
    out, *after, kept = outputs
    _, n, d, e = sizes
    one_token = n == 1 and inputs[3] is None and inputs[4] is not None
    kernel, results = kernels.step if one_token else kernels.forward, (rows(out), rows(kept))
    work = kernels.forward_work(d, e)
    threads.run(kernel, heads, 2 * operations, work, out, sizes, *arguments, results, addresses(after))


def _backward(inputs: tuple, constants: tuple, saved: list, grads: list, grad_inputs: list) -> None:
    from . import backward_kernels as kernels

    (heads, operations, sizes, *arguments), _tensors = _arguments(inputs, constants)
    out, kept = map(contiguous_channels, saved)  # a hook of saved tensors may have given them another layout
    grad_out = torch.zeros_like(out) if grads[0] is None else contiguous_channels(grads[0])
    # The kernel writes the gradients of q, k and v, also where they are not wanted.
    targets = [empty_like(x) if grad is None else grad for x, grad in zip(inputs[:3], grad_inputs)]
    grad_after = [x if x is None else x.contiguous() for x in grads[1:]]
    before = [x if x is None or x.is_contiguous() else x.new_empty(x.shape) for x in grad_inputs[5:]]
    arguments += (rows(out), rows(kept), rows(grad_out)), addresses(grad_after), tuple(map(rows, targets))
    work = kernels.backward_work(*sizes[1:])
    threads.run(kernels.backward, heads, 6 * operations, work, out, sizes, *arguments, addresses(before))
    for target, x in zip(grad_inputs[5:], before):
        if target is not x:
            target.copy_(x)


def _arguments(inputs: tuple, constants: tuple) -> tuple[tuple, list]:
    """Arguments of both passes for their kernels, and the tensors whose addresses these hold, to be kept meanwhile."""
    padding, count = inputs[3:5]
    q, k, v = [contiguous_channels(x) for x in inputs[:3]]
    sums = [x if x is None or x.is_contiguous() else x.contiguous() for x in inputs[5:]]
    tokens = [*real_tokens(padding), count if count is None else count.contiguous()]
    (batch, heads, n, d), e = q.shape, v.shape[3]
    options, places = kernel_options(tuple(constants), q.dtype), (rows(q), rows(k), rows(v))
    arguments = (heads, n, d, e), options, addresses(tokens), places, addresses(sums)
    return (batch * heads, batch * heads * n * d * e, *arguments), [q, k, v, *sums, *tokens]


def _plain(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, count: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """The operator's results in PyTorch's differentiable functions."""
    sums, options = rest[: len(STATE_SUMS)], options_of(rest[len(STATE_SUMS) :])
    state = None if count is None else {"count": count, **dict(zip(STATE_SUMS, sums))}
    with autocast_off(q):
        out, after = attention_in_chunks(CausalInputs(q, k, v, padding, options, CHUNK_SIZE, state))
    return (out, *(after[name] for name in STATE_SUMS))


_operator = kernel_operator(
    "causal_flow",
    ("q", "k", "v", "padding?", "count?", *(f"{name}?" for name in STATE_SUMS)),
    SCHEMA,
    (1 + len(STATE_SUMS), 1),
    lambda *_: (0, 1 + len(STATE_SUMS)),
    _allocate,
    _forward,
    _backward,
    _plain,
    multiply_adds=(2, 6),
)
