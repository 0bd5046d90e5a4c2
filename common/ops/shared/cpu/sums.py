"""Causal sums by kernels, as an operator of PyTorch.

Legend: B batch, H heads, n tokens, f features of a query or key, e channels of a value.
"""

from typing import Any

from torch import Tensor

from ..chunked_sums import sums_in_chunks
from ..chunks import CHUNK_SIZE
from ..feature_maps import FEATURE_MAPS, feature_map
from . import dispatch, threads
from .operators import kernel_operator
from .tensors import Address, contiguous_channels, empty_like, number, numbers, rows, vectors

#: Kinds of gates by the number of dimensions of log_decay, as in ``fours``.
_KINDS = {3: 1, 4: 2}


def applies(*tensors: Tensor | None) -> bool:
    """Whether ``causal_sums`` of these tensors, q first, can go through kernels."""
    return dispatch.applies(*(x for x in tensors if x is not None))


def causal_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    sum_kv: Tensor | None,
    sum_k: Tensor | None,
    weighs: bool = True,
    divisor: tuple[float, float] | None = None,
    phi: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of values (B, H, n, e) and of weights (B, H, n, 1), and the last ``sum_kv`` and ``sum_k``.

    q, k (B, H, n, f), v (B, H, n, e), ``log_decay`` (B, H, n) or (B, H, n, f), at most 0, or None; ``sum_kv``
    (B, H, f, e) and ``sum_k`` (B, H, f): the sums before, None for 0. Without ``weighs``, ``sum_k`` is None, and the
    results for weights have no numbers. With a ``divisor`` (eps, least) the first result is divided by weights + eps,
    or by ``least`` where that is more. ``phi`` is the feature map that q and k are given to, None if they are features.
    O(n f e) time, O(n (f + e) + f e) memory; the backward pass needs O((n / 64)
    f e) for each thread.
    """
    if log_decay is not None:
        log_decay = log_decay.expand(*q.shape[:3], *log_decay.shape[3:])
    return _operator(
        q, k, v, log_decay, sum_kv, sum_k, weighs, divisor is not None, *(divisor or (0.0, 0.0)), _map(phi)
    )


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    sum_kv: Tensor,
    sum_k: Tensor | None,
    divisor: tuple[float, float] | None = None,
    phi: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``causal_sums`` of one token for which ``applies`` was asked before, without gradients."""
    if log_decay is not None:
        log_decay = log_decay.expand(*q.shape[:3], *log_decay.shape[3:])
    inputs = q, k, v, log_decay, sum_kv, sum_k
    constants = sum_k is not None, divisor is not None, *(divisor or (0.0, 0.0)), _map(phi)
    outputs = _allocate(*inputs, *constants)
    _forward(inputs, constants, outputs)
    return outputs


def _allocate(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, heads, n, f), weighs = q.shape, rest[3]
    weights, sum_k = ((batch, heads, n, 1), (batch, heads, f)) if weighs else ((0,), (0,))
    return empty_like(v), q.new_empty(weights), q.new_empty(batch, heads, f, v.shape[3]), q.new_empty(sum_k)


def _forward(inputs: tuple, constants: tuple, outputs: tuple) -> None:
    from . import sums_kernels as kernels

    call = _Call(inputs, constants, *outputs[:2])
    _, n, f, e = call.sizes
    if n == 1 and inputs[4] is not None:
        kernel, work = kernels.step, 2 * f
    else:
        kernel, work = kernels.forward, kernels.forward_work(f, e)
    after = rows(outputs[2]), vectors(outputs[3])
    threads.run(kernel, call.heads, 2 * call.entries, work, outputs[0], *call.arguments, after)


def _backward(inputs: tuple, constants: tuple, saved: list, grads: list, grad_inputs: list) -> None:
    from . import sums_kernels as kernels

    grad_out, grad_weights, *grad_after = map(contiguous_channels, grads)
    grad_out = inputs[2].new_zeros(inputs[2].shape) if grad_out is None else grad_out
    # Of results, the kernel reads weights where there is a divisor, and else only whether there are any.
    weights = saved[0] if saved else grad_out[..., :1] if constants[0] else None
    call = _Call(inputs, constants, grad_out, weights)
    # The kernel writes the gradients of q, k and v, also where they are not wanted.
    targets = [empty_like(x) if grad is None else grad for x, grad in zip(inputs[:3], grad_inputs)]
    arguments = (
        (rows(grad_out), rows(grad_weights)),
        (rows(grad_after[0]), vectors(grad_after[1])),
        (*map(rows, targets), _gates(grad_inputs[3])),
        (rows(grad_inputs[4]), vectors(grad_inputs[5])),
    )
    work = kernels.backward_work(*call.sizes[1:])
    threads.run(kernels.backward, call.heads, 6 * call.entries, work, grad_out, *call.arguments, *arguments)


class _Call:
    """The arguments that both passes give to their kernels; it keeps the tensors whose addresses it gives."""

    def __init__(self, inputs: tuple, constants: tuple, out: Tensor, weights: Tensor | None) -> None:
        # Results too: a hook of saved tensors may have given them another layout.
        self._kept = q, k, v, log_decay, sum_kv, sum_k, out = [contiguous_channels(x) for x in (*inputs, out)]
        (batch, heads, n, f), e, (_, divides, eps, least, phi) = q.shape, v.shape[3], constants
        self.sizes, self.heads, self.entries = (heads, n, f, e), batch * heads, batch * heads * n * f * e
        kind = 0 if log_decay is None else _KINDS[log_decay.dim()]
        tokens = (rows(q), rows(k), rows(v), _gates(log_decay), kind, phi)
        divisor = divides, number(eps, q), number(least, q)
        self.arguments = self.sizes, tokens, (rows(sum_kv), vectors(sum_k)), (rows(out), rows(weights)), divisor


def _map(phi: str | None) -> int:
    """The number of a feature map in ``fours``, 0 for None."""
    return 0 if phi is None else 1 + FEATURE_MAPS.index(phi)


def _gates(log_decay: Tensor | None) -> Address:
    """log_decay, or its gradient, (B, H, n) or (B, H, n, f)."""
    return numbers(log_decay) if log_decay is not None and log_decay.dim() == 3 else rows(log_decay)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    sum_kv: Tensor | None,
    sum_k: Tensor | None,
    weighs: bool,
    divides: bool,
    eps: float,
    least: float,
    phi: int,
) -> tuple[Tensor, ...]:
    """``causal_sums`` in PyTorch's differentiable functions."""
    state = None if sum_kv is None else {"sum_kv": sum_kv, "sum_k": sum_k}
    if sum_kv is not None and not weighs:
        state["sum_k"] = sum_kv.new_zeros(sum_kv.shape[:3])
    if phi:
        q, k = (feature_map(x, FEATURE_MAPS[phi - 1]) for x in (q, k))
    values, weights, state = sums_in_chunks(q, k, v, CHUNK_SIZE, state, log_decay)
    values = values / (weights + eps).clamp(min=least) if divides else values
    if not weighs:
        return values, q.new_empty(0), state["sum_kv"], q.new_empty(0)
    return values, weights, state["sum_kv"], state["sum_k"]


_operator = kernel_operator(
    "causal_sums",
    ("q", "k", "v", "log_decay?", "sum_kv?", "sum_k?"),
    "bool weighs, bool divides, float eps, float least, int phi",
    (4, 0),
    lambda weighs, divides, *_: (1,) if divides else (),
    _allocate,
    _forward,
    _backward,
    _plain,
    multiply_adds=(2, 4),
)
