"""DAFT-full: attention without dot products, by key and by pair of positions.

*A Dot Product Attention Free Transformer*, equations 5 and 6.
"""

import torch
from torch import Tensor

from ..shared.checks import check_gate_key_value, check_padding_mask
from ..shared.kv_cache import extend_kv_cache
from ..shared.packed import takes_segments
from ..shared.padding import padding_or_none, real_first, real_positions, take, zero_padded_tokens, zero_padding
from ..shared.precision import autocast_off, autocast_remains, compute_dtype
from ..shared.state import State, check_continuation
from .full_sequence import attend_to_all, exceeds_float32, whole_sequence

#: w itself, or the pair of its factors.
PositionBias = Tensor | tuple[Tensor, Tensor]


@takes_segments("q", "k", "v")
def daft_full(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: PositionBias,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """sigmoid(q_t) ⊙ Σ_t' exp(k_t' + w_tt') ⊙ v_t' / Σ_t' exp(k_t' + w_tt') over all t', causal t' <= t (Eq. 5).

    B batch, T tokens, d channels: q, k and v (B, T, d) -> (B, T, d) in v's dtype; q = None omits the sigmoid (Table 8).
    ``w`` is (N, N) for N >= T tokens, whose leading part is used, or the pair of its factors, (N, n) each (Eq. 6).
    ``key_padding_mask``: bool (B, T), True = padding, on any side; positions count real tokens and a padded token
    gives 0. Cost: O(T² d) time in matrix products, O(T (T + d)) memory; no T x T x d tensor is formed.

    Keys of ±100 and biases of any size are accurate to float32 precision, even if a token sees only small keys and
    large keys come later: if the keys of a channel and the biases of a token both span more than 90 (largest minus
    smallest), everything is computed in float64, which takes about twice the time. A compiled graph cannot choose and
    stops with an error in this case. Otherwise the choice reads one number back from a GPU at every call. This
    synchronizes: the host cannot run ahead of the device.

    ``initial_state`` and ``return_state`` (causal) continue a sequence: the state is all keys and values so far, ``k``
    and ``v`` (B, 1, m, d), and ``padding_mask`` (B, m). It grows, since the definition needs all of them. One token
    after m others costs O(m (d + n)).

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype, mask or state that does not fit, more tokens than ``w`` has, or a state without
            ``causal``; keys of a channel and biases of a token that both span more than 600.
    """
    check_gate_key_value(q, k, v)
    check_padding_mask("key_padding_mask", key_padding_mask, k.unsqueeze(1))
    check_continuation(causal, initial_state, return_state)
    remember = initial_state is not None or return_state
    new = {"k": k.unsqueeze(1), "v": v.unsqueeze(1)}
    history = extend_kv_cache(new, key_padding_mask, initial_state) if remember else None
    length = k.shape[1] if history is None else history["k"].shape[2]
    check_position_bias(w, length, k)
    dtype = compute_dtype(k)
    with autocast_off(k):
        if initial_state is None:
            out = whole_sequence(k, v, leading_bias(w, length, dtype), causal, key_padding_mask)
        elif k.shape[1] == 1:
            out = _step(history, w)
        else:
            tokens = (history["k"].squeeze(1), history["v"].squeeze(1))
            bias = leading_bias(w, length, dtype)
            out = whole_sequence(*tokens, bias, True, history["padding_mask"])[:, -k.shape[1] :]
        out = zero_padded_tokens(out, key_padding_mask)
        if q is not None:
            out = torch.sigmoid(zero_padded_tokens(q.to(dtype), key_padding_mask)) * out
    out = out.to(v.dtype)
    return (out, history) if return_state else out


def daft_full_in_torchscript(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """``daft_full`` with ``causal=False`` and no mask, for callers inside TorchScript; w (T, T) multiplied out.

    Arguments are not checked; shapes and cost as in ``daft_full``.
    """
    dtype = compute_dtype(k)
    if autocast_remains(k.to(dtype)) or bool(exceeds_float32(k.to(dtype), w.to(dtype))):
        dtype = torch.float64
    out = attend_to_all(k.to(dtype), v.to(dtype), w.to(dtype)).mean
    if q is not None:
        out = torch.sigmoid(q.to(dtype)) * out
    return out.to(v.dtype)


def check_position_bias(w: PositionBias, tokens: int, like: Tensor) -> None:
    """Raise ValueError unless ``w`` is (N, N), or two of (N, n), for N of at least ``tokens``, on ``like``'s device."""
    factors = (w,) if isinstance(w, Tensor) else w
    if not isinstance(factors, (tuple, list)) or len(factors) not in (1, 2):
        raise ValueError(f"w is a {type(w).__name__}; allowed: a tensor (N, N), or two (N, n)")
    for x in factors:
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point() or x.device != like.device:
            content = f"{tuple(x.shape)}, {x.dtype}, on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"w is {content}; allowed: floating point (N, N), or two (N, n), on {like.device}")
    if factors[0].shape != factors[-1].shape or (len(factors) == 1 and w.shape[0] != w.shape[1]):
        raise ValueError(f"w has shapes {[tuple(x.shape) for x in factors]}; allowed: one (N, N), or two (N, n)")
    if tokens > factors[0].shape[0]:
        most = factors[0].shape[0]
        raise ValueError(f"the input has {tokens} tokens; allowed: at most {most}, the rows of w, or max_tokens")


def leading_bias(w: PositionBias, tokens: int, dtype: torch.dtype) -> Tensor:
    """The leading (tokens, tokens) part of ``w``, multiplied out if ``w`` is a pair of factors."""
    if isinstance(w, Tensor):
        return w[:tokens, :tokens].to(dtype)
    return w[0][:tokens].to(dtype) @ w[1][:tokens].to(dtype).transpose(0, 1)


def _step(history: State, w: PositionBias) -> Tensor:
    """The last token of ``history``, (B, 1, d). Only its row of w is formed: O(m (d + n)) for m tokens."""
    k, v, padding = history["k"].squeeze(1), history["v"].squeeze(1), padding_or_none(history["padding_mask"])
    dtype, order, tokens = compute_dtype(k), real_first(padding), k.shape[1]
    k, v = (take(zero_padding(x.to(dtype).unsqueeze(1), padding), order).squeeze(1) for x in (k, v))
    if padding is None:
        bias = _rows_of_bias(w, torch.tensor([tokens - 1], device=k.device), tokens, dtype)  # (1, m)
    else:
        position = real_positions(padding)[:, -1]  # (B,)
        later = torch.arange(tokens, device=k.device) > position[:, None]  # (B, m)
        bias = _rows_of_bias(w, position, tokens, dtype).masked_fill(later, -torch.inf)
    bias = bias - bias.detach().amax(1, keepdim=True)  # a constant cancels; a large one would round the keys
    weights = (k + bias[..., None]).softmax(1)  # (B, m, d)
    return (weights * v).sum(1, keepdim=True)


def _rows_of_bias(w: PositionBias, rows: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The first ``tokens`` entries of the rows ``rows`` (B,) of ``w``: (B, tokens)."""
    first, last = (w, None) if isinstance(w, Tensor) else w
    chosen = first[rows.clamp(max=tokens - 1)].to(dtype)  # (B, N), or (B, n) of a factor
    return chosen[:, :tokens] if last is None else chosen @ last[:tokens].to(dtype).transpose(0, 1)
