"""The core of linear attention for precomputed features: sums of values, weighted by products of features.

Legend: B batch, H heads, n queries, m keys, f features of a query or key, e channels of a value, C tokens of a chunk,
G chunks. A mechanism computes the features, 0 at padding, and divides by the sum of the weights in its own way.
"""

import torch
from torch import Tensor

from .chunked_sums import channel_decayed_sums, sums_in_chunks
from .cpu.sums import applies as kernels_apply
from .cpu.sums import causal_sums as sums_by_kernels
from .cpu.sums import step as step_by_kernels
from .feature_maps import feature_map
from .gpu.launch import several_on_gpu
from .padding import zero_padding
from .state import State, state_of_source
from .tracing import runs_eagerly


def state_shapes(features: int, v: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state of ``causal_sums``, for v (B, H, n, e)."""
    vector = (*v.shape[:2], features)
    return {"sum_k": vector, "sum_kv": (*vector, v.shape[3])}


def full_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j (q_i·k_j) v_j (B, H, n, e) and Σ_j q_i·k_j (B, H, n, 1) over all keys; O(n f e).

    q (B, H, n, f), k (B, H, m, f), v (B, H, m, e).
    """
    sum_k, sum_kv = _sums_over_keys(k, v)
    return _read(q, sum_k, sum_kv)


def sums_of_source(k: Tensor, v: Tensor, padding_mask: Tensor | None) -> State:
    """State of a source, ``sum_k`` (B, H, f) and ``sum_kv`` (B, H, f, e), from features k (B, H, m, f) of its tokens.

    v (B, H, m, e) may have any dtype and any values at padding; ``padding_mask`` (B, m), True = padding. O(m f e) time.
    """
    sum_k, sum_kv = _sums_over_keys(k, zero_padding(v.to(k.dtype), padding_mask))
    return {"sum_k": sum_k, "sum_kv": sum_kv}


def read_source(q: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """``full_sums`` of features q (B, H, n, f) over the source of ``state``; O(n f e), whatever its length.

    Raises:
        ValueError: ``state`` does not fit.
    """
    state = state_of_source(state, ("sum_k",), q)
    return _read(q, state["sum_k"], state["sum_kv"])


def _divided(values: Tensor, weights: Tensor, eps: float, least: float) -> Tensor:
    return values / (weights + eps if eps else weights.clamp(min=least))


def _sums_over_keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.sum(2), k.transpose(-2, -1) @ v


def _read(q: Tensor, sum_k: Tensor, sum_kv: Tensor) -> tuple[Tensor, Tensor]:
    return q @ sum_kv, (q * sum_k.unsqueeze(2)).sum(-1, keepdim=True)


def causal_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    state: State | None,
    log_decay: Tensor | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, State]:
    """Σ_(j <= i) (q_i·k_j) v_j (B, H, n, e), Σ_(j <= i) q_i·k_j (B, H, n, 1), and the state after the tokens.

    q, k (B, H, n, f), v (B, H, n, e). The sums continue those of ``state``, ``sum_k`` and ``sum_kv`` in the dtype of
    the features, or start from 0 if it is None. ``log_decay``, at most 0 and finite, is (B, H, n): before token t is
    added, all sums are multiplied by exp(log_decay_t); or (B, H, n, f): the sums of each feature c by
    exp(log_decay_tc). On a CPU by kernels, see ``cpu/sums.py``, otherwise as ``sums_in_chunks``, which says the cost.
    ``precision`` is the dtype of the tokens that the features were made of: fla's kernels may multiply in it.
    """
    if kernels_apply(q, k, v, log_decay, *_sums_before(state)):
        return _by_kernels(q, k, v, state, log_decay)
    if several_on_gpu(q):
        from .gpu import running_sums  # not above: CPUs do not need it

        if running_sums.KERNELS.apply_to(precision, q, k, v, None, log_decay, _sums_before(state)[0]):
            return running_sums.causal_sums(q, k, v, chunk_size, state, log_decay, precision)
    if q.shape[2] == 1 and state is not None:
        return _step(q, k, v, state, log_decay)
    return sums_in_chunks(q, k, v, chunk_size, state, log_decay)


def means(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    chunk_size: int,
    state: State | None,
    log_decay: Tensor | None = None,
    *,
    eps: float = 0.0,
    least: float = 0.0,
    phi: str | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, State | None]:
    """The values of ``causal_sums`` divided by max(weights + ``eps``, ``least``), and the state after the tokens.

    If not ``causal``, those of ``full_sums``, and None. ``phi`` is the feature map that q and k are given to, None if
    they are features already, as they must be if not ``causal``.
    """
    if not causal:
        return _divided(*full_sums(q, k, v), eps, least), None
    if kernels_apply(q, k, v, log_decay, *_sums_before(state)):
        out, _, state = _by_kernels(q, k, v, state, log_decay, (eps, least), phi)
        return out, state
    if phi is not None:
        q, k = feature_map(q, phi), feature_map(k, phi)
    values, weights, state = causal_sums(q, k, v, chunk_size, state, log_decay, precision)
    return _divided(values, weights, eps, least), state


def step_means(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    log_decay: Tensor | None = None,
    *,
    eps: float = 0.0,
    least: float = 0.0,
    phi: str | None = None,
) -> tuple[Tensor, State]:
    """``means`` of one token after ``state``, without gradients, where ``kernels_apply`` to the inputs of features."""
    if not type(q) is type(k) is Tensor:  # parameters of another class made them
        return means(q, k, v, True, 1, state, log_decay, eps=eps, least=least, phi=phi)
    out, _, sum_kv, sum_k = step_by_kernels(q, k, v, log_decay, state["sum_kv"], state["sum_k"], (eps, least), phi)
    return out, {"sum_k": sum_k, "sum_kv": sum_kv}


def source_means(q: Tensor, state: State, *, eps: float = 0.0, least: float = 0.0) -> Tensor:
    """The values of ``read_source`` divided by max(weights + ``eps``, ``least``)."""
    return _divided(*read_source(q, state), eps, least)


def decayed_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    chunk_size: int,
    sum_kv: Tensor | None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``causal_sums`` of values alone, with a decay for each feature: (B, H, n, e), and the last ``sum_kv``.

    ``sum_kv`` (B, H, f, e) is the sum before the first token, zero when None.
    """
    if kernels_apply(q, k, v, log_decay, sum_kv):
        values, _, sum_kv, _ = sums_by_kernels(q, k, v, log_decay, sum_kv, None, weighs=False)
        return values, sum_kv
    if several_on_gpu(q):
        from .gpu.running_sums import KERNELS  # not above: CPUs do not need it

        if KERNELS.apply_to(precision, q, k, v, None, log_decay, sum_kv):
            return KERNELS(precision, chunk_size, q, k, v, None, log_decay, sum_kv)
    return channel_decayed_sums(q, k, v, log_decay, chunk_size, sum_kv)


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    log_decay: Tensor | None,
    divisor: tuple[float, float] | None = None,
    phi: str | None = None,
) -> tuple[Tensor, Tensor, State]:
    values, weights, sum_kv, sum_k = sums_by_kernels(q, k, v, log_decay, *_sums_before(state), True, divisor, phi)
    return values, weights, {"sum_k": sum_k, "sum_kv": sum_kv}


def _sums_before(state: State | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if state is None else (state["sum_kv"], state["sum_k"])


def _step(q: Tensor, k: Tensor, v: Tensor, state: State, log_decay: Tensor | None) -> tuple[Tensor, Tensor, State]:
    """``causal_sums`` of one token after ``state``, in the few operations that one token needs; O(f e)."""
    sum_k, sum_kv, add = state["sum_k"], state["sum_kv"], torch.addcmul
    if log_decay is None:
        sum_k = sum_k + k.squeeze(2)
    else:
        decay = (log_decay if log_decay.dim() == 3 else log_decay.squeeze(2)).exp()  # (B, H, 1) or (B, H, f)
        sum_k, sum_kv = torch.addcmul(k.squeeze(2), sum_k, decay), sum_kv * decay.unsqueeze(-1)
        if runs_eagerly(k, v, sum_kv):
            add = Tensor.addcmul_  # in place, into a tensor made here: a new one would be a tenth of the step's time
    sum_kv = add(sum_kv, k.transpose(-2, -1), v)
    return *_read(q, sum_k, sum_kv), {"sum_k": sum_k, "sum_kv": sum_kv}
