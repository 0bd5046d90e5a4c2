"""The gated delta rule by kernels, as an operator of PyTorch. ``kernels`` has the loops."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...shared.cpu import dispatch, threads
from ...shared.cpu.operators import kernel_operator
from ...shared.cpu.tensors import ABSENT, Address, contiguous_channels, empty_like, number, numbers, rows
from ..causal import CHUNK_SIZE, delta_chunks
from ..directions import ACTIVATIONS, EPS, QK_NORMS, directed

#: Tokens of a tile, as in ``kernels``, which cannot be imported without Numba.
_TILE = 64


def applies(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, memory: Tensor | None) -> bool:
    """Whether ``delta_by_kernels`` computes these tensors."""
    return dispatch.applies(*(x for x in (q, k, v, beta, log_decay, memory) if x is not None))


def delta_by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    memory: Tensor | None,
    qk_activation: str,
    qk_norm: str,
    v_activation: str,
) -> tuple[Tensor, Tensor]:
    """``delta_chunks`` of what ``directed`` makes of q, k (B, H, n, d) and v (B, H, n, e); ``memory`` None is zeros.

    O(n d e) time. For the backward pass the errors (B, H, n, e) are kept, and the memory before each 64 tokens.
    """
    options = qk_activation == ACTIVATIONS[0], qk_norm == QK_NORMS[0], v_activation == ACTIVATIONS[0]
    tensors = (q, k, v, beta, log_decay, memory)
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    out, last, _ = _operator(*tensors, *options, keeps)
    return out, last


def step_by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    memory: Tensor,
    qk_activation: str,
    qk_norm: str,
    v_activation: str,
) -> tuple[Tensor, Tensor]:
    """``delta_by_kernels`` of one token for which ``applies`` was asked before, without gradients."""
    options = qk_activation == ACTIVATIONS[0], qk_norm == QK_NORMS[0], v_activation == ACTIVATIONS[0]
    inputs, constants = (q, k, v, beta, log_decay, memory), (*options, False)
    outputs = _allocate(*inputs, *constants)
    _forward(inputs, constants, outputs)
    return outputs[:2]


def _allocate(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, n, d), e = q.shape, v.shape[3]
    kept = (batch, heads, n + (n + _TILE - 1) // _TILE * d, e) if rest[-1] else (0,)
    return empty_like(v), q.new_empty(batch, heads, d, e), q.new_empty(kept)


def _forward(inputs: tuple, constants: tuple, outputs: tuple) -> None:
    from . import kernels

    call = _Call(inputs, constants)
    (_, n, d, e), (out, last, kept), memory = call.sizes, outputs, call.memory
    arguments = call.sizes, call.tokens, rows(memory), rows(last), rows(out)
    if n == 1 and memory is not None and not constants[-1]:
        kernel, work = kernels.step, kernels.step_work(d, e)
    else:
        kernel, work, arguments = kernels.forward, kernels.forward_work(d, e), (*arguments, rows(kept))
    threads.run(kernel, call.heads, 3 * call.entries, work, out, *arguments, call.directions)


def _backward(inputs: tuple, constants: tuple, saved: list, grads: list, grad_inputs: list) -> None:
    from . import kernels

    call = _Call(inputs, constants)
    # A hook of saved tensors may have given what is kept another layout.
    grad_out, grad_last, kept = map(contiguous_channels, (*grads, saved[0]))
    grad_out = inputs[2].new_zeros(inputs[2].shape) if grad_out is None else grad_out
    # The kernel writes the gradients of all tokens, also where they are not wanted.
    targets = [
        empty_like(x) if grad is None and x is not None else grad for x, grad in zip(inputs[:5], grad_inputs[:5])
    ]
    grad_tokens = *map(rows, targets[:3]), numbers(targets[3]), _gates(targets[4])
    arguments = rows(kept), rows(grad_out), rows(grad_last), grad_tokens, rows(grad_inputs[5]), call.directions
    work = kernels.backward_work(*call.sizes[2:])
    threads.run(kernels.backward, call.heads, 8 * call.entries, work, grad_out, call.sizes, call.tokens, *arguments)


class _Call:
    """Arguments that both passes give to their kernels; it keeps the tensors whose addresses it gives."""

    def __init__(self, inputs: tuple, constants: tuple) -> None:
        q, k, v, beta, log_decay, memory = inputs
        (batch, heads, n, d), e = q.shape, v.shape[3]
        self.sizes, self.heads, self.entries = (heads, n, d, e), batch * heads, batch * heads * n * d * e
        if memory is not None and memory.stride()[2:] != (e, 1):
            memory = memory.contiguous()
        q, k, v = map(contiguous_channels, (q, k, v))
        self._kept = q, k, v, memory
        self.tokens, self.memory = (rows(q), rows(k), rows(v), numbers(beta), _gates(log_decay)), memory
        self.directions = *constants[:3], *_factors(d, q.dtype)


@functools.cache
def _factors(d: int, dtype: torch.dtype) -> tuple[np.floating, np.floating]:
    """The factor of queries, and what is added to squares of norms."""
    like = torch.empty(0, dtype=dtype, device="cpu")  # whatever the default device is
    return number(d**-0.5, like), number(EPS, like)


def _gates(x: Tensor | None) -> Address:
    """log_decay or its gradient, (B, H, n) or None."""
    return ABSENT if x is None else numbers(x)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    memory: Tensor | None,
    qk_silu: bool,
    qk_l2: bool,
    v_silu: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """The results in PyTorch's differentiable functions."""
    activations = [ACTIVATIONS[0] if on else ACTIVATIONS[1] for on in (qk_silu, v_silu)]
    tokens = directed(q, k, v, activations[0], QK_NORMS[0] if qk_l2 else QK_NORMS[1], activations[1])
    memory = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if memory is None else memory
    return delta_chunks(*tokens, beta, log_decay, CHUNK_SIZE, memory)


_operator = kernel_operator(
    "gated_delta_rule",
    ("q", "k", "v", "beta", "log_decay?", "memory?"),
    "bool qk_silu, bool qk_l2, bool v_silu, bool keeps",
    (2, 1),
    lambda *_: (2,),
    _allocate,
    _forward,
    _backward,
    _plain,
    multiply_adds=(3, 8),
)
