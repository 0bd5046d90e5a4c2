"""DAFT-full: attention without dot products, by key and by pair of positions.

*A Dot Product Attention Free Transformer*, equations 5 and 6.
"""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .alignment import put_back, real_first, real_positions, take
from .checks import State, check_gate_key_value, check_padding_mask
from .chunks import autocast_off, autocast_remains, compute_dtype, zero_padding
from .history import extend_history
from .weighted_means import WeightedMean, headroom, mean_of_sums, merge

PositionBias = Union[Tensor, Tuple[Tensor, Tensor]]

#: Tokens whose exponentials are written out pair by pair at the bottom of the causal form.
_BASE = 8


def daft_full(
    q: Optional[Tensor],
    k: Tensor,
    v: Tensor,
    w: PositionBias,
    *,
    causal: bool = False,
    key_padding_mask: Optional[Tensor] = None,
    initial_state: Optional[State] = None,
    return_state: bool = False,
) -> Union[Tensor, Tuple[Tensor, State]]:
    """sigmoid(q_t) ⊙ Σ_t' exp(k_t' + w_tt') ⊙ v_t' / Σ_t' exp(k_t' + w_tt') over all t', causal t' <= t (Eq. 5).

    B batch, T tokens, d channels: q, k and v (B, T, d) -> (B, T, d) in v's dtype; q None leaves the sigmoid out (Table
    8). ``w`` is (N, N) for N >= T tokens, of which the leading part is used, or the pair of its factors, (N, n) each
    (Eq. 6). ``key_padding_mask``: bool (B, T), True = padding, on any side; positions count real tokens and a padded
    token gives 0. Cost: O(T² d) time in matrix products, O(T (T + d)) memory; no T x T x d tensor exists. Exponentials
    are taken relative to maxima over what a token sees, so keys of ±100 or biases of ±50 do no harm, also where a token
    sees small keys alone and large ones come later.

    ``initial_state`` and ``return_state`` (causal) continue a sequence: its keys and values so far, ``k`` and ``v`` (B,
    1, m, d) and ``padding_mask`` (B, m), which is what the definition needs; O(m (d + n)) for one token after m.

    Raises:
        ValueError: a shape, dtype, mask or state that does not fit, more tokens than ``w`` has, or a state without
            ``causal``.
    """
    check_gate_key_value(q, k, v)
    check_padding_mask("key_padding_mask", key_padding_mask, k.unsqueeze(1))
    if not causal and (initial_state is not None or return_state):
        raise ValueError("initial_state and return_state are given with causal=False; allowed: only with causal=True")
    remember = initial_state is not None or return_state
    seen = {"k": k.unsqueeze(1), "v": v.unsqueeze(1)}
    history = extend_history(seen, key_padding_mask, initial_state) if remember else None
    length = k.shape[1] if history is None else history["k"].shape[2]
    check_position_bias(w, length, k)
    dtype = compute_dtype(k)
    with autocast_off(k):
        if initial_state is None:
            out = _whole(k, v, leading_bias(w, length, dtype), causal, key_padding_mask)
        elif k.shape[1] == 1:
            out = _step(history, w)
        else:
            tokens = (history["k"].squeeze(1), history["v"].squeeze(1))
            bias = leading_bias(w, length, dtype)
            out = _whole(*tokens, bias, True, history["padding_mask"])[:, -k.shape[1] :]
        out = zero_padding(out.unsqueeze(1), key_padding_mask).squeeze(1)
        if q is not None:
            out = torch.sigmoid(zero_padding(q.to(dtype).unsqueeze(1), key_padding_mask).squeeze(1)) * out
    out = out.to(v.dtype)
    return (out, history) if return_state else out


def daft_full_scriptable(q: Optional[Tensor], k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """``daft_full`` with ``causal=False`` and no mask, for callers inside TorchScript; w (T, T) multiplied out.

    Arguments are not checked; shapes and cost as in ``daft_full``.
    """
    dtype = compute_dtype(k)
    if autocast_remains(k.to(dtype)):
        dtype = torch.float64
    out = _attend(k.to(dtype), v.to(dtype), w.to(dtype)).mean
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
            given = f"{tuple(x.shape)}, {x.dtype}, on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"w is {given}; allowed: floating point (N, N), or two (N, n), on {like.device}")
    if factors[0].shape != factors[-1].shape or (len(factors) == 1 and w.shape[0] != w.shape[1]):
        raise ValueError(f"w has shapes {[tuple(x.shape) for x in factors]}; allowed: one (N, N), or two (N, n)")
    if tokens > factors[0].shape[0]:
        raise ValueError(f"the input has {tokens} tokens; allowed by w: at most {factors[0].shape[0]}")


def leading_bias(w: PositionBias, tokens: int, dtype: torch.dtype) -> Tensor:
    """The leading (tokens, tokens) of ``w``, multiplied out of its factors where it has any."""
    if isinstance(w, Tensor):
        return w[:tokens, :tokens].to(dtype)
    return w[0][:tokens].to(dtype) @ w[1][:tokens].to(dtype).transpose(0, 1)


def _whole(k: Tensor, v: Tensor, w: Tensor, causal: bool, padding_mask: Optional[Tensor]) -> Tensor:
    """A whole sequence without its gate."""
    dtype, order = compute_dtype(k), real_first(padding_mask)
    k, v = (take(zero_padding(x.to(dtype).unsqueeze(1), padding_mask), order).squeeze(1) for x in (k, v))
    if causal:  # the padding stands behind the real tokens now: none that matters sees it
        out = _causal(k, v, w)
    else:
        if padding_mask is not None:
            place = torch.arange(k.shape[1], device=k.device)
            behind = place >= (~padding_mask).sum(1, keepdim=True)  # (B, T)
            # A row without a real token has nothing to sum, and is zeroed in the end.
            k = k.masked_fill((behind & ~padding_mask.all(1, keepdim=True))[..., None], -torch.inf)
        out = _attend(k, v, w).mean
    return put_back(out.unsqueeze(1), order).squeeze(1)


def _attend(k: Tensor, v: Tensor, w: Tensor) -> WeightedMean:
    """Every query of w (..., n, m) over all keys k, v (..., m, d): two matrix products with exp(w); (..., n, d).

    What cancels between the two sums, a maximum per channel and one per row of w, is subtracted first.
    """
    over_k = k.detach().amax(-2, keepdim=True) - headroom()  # (..., 1, d)
    over_w = w.detach().amax(-1, keepdim=True) - headroom()  # (..., n, 1)
    key = torch.exp(k - over_k)  # (..., m, d)
    sums = torch.exp(w - over_w) @ torch.cat([key * v, key], dim=-1)  # (..., n, 2d)
    weighted, weight = sums.chunk(2, dim=-1)
    return mean_of_sums(weighted, weight, over_k + over_w)


def _causal(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Each token over itself and those before: blocks of 8 pair by pair, then each second block over the one before it.

    Blocks double until one holds all, so each product is over keys that all its queries see.
    """
    length = k.shape[1]
    padded = _padded_length(length)
    missing = padded - length
    k, v = (F.pad(x, (0, 0, 0, missing)) for x in (k, v))
    w = F.pad(w, (0, missing, 0, missing))
    again = torch.is_grad_enabled() and length > _BASE
    sums = checkpoint(_base, k, v, w, use_reentrant=False) if again else _base(k, v, w)
    size = _BASE
    while size < padded:
        pairs, rest = divmod(padded, 2 * size)
        whole = pairs * 2 * size
        parts = [] if pairs == 0 else [_second_halves(sums, k, v, w, pairs, size)]
        if rest > size:  # a last pair whose second block is short
            start, middle = whole, whole + size
            before = _attend(k[:, start:middle], v[:, start:middle], w[middle:, start:middle])
            tail = merge(before, WeightedMean(*(x[:, middle:] for x in sums)))
            parts += [WeightedMean(*(x[:, start:middle] for x in sums)), tail]
        elif rest:
            parts.append(WeightedMean(*(x[:, whole:] for x in sums)))
        sums = WeightedMean(*(torch.cat(x, dim=1) for x in zip(*parts)))
        size *= 2
    return sums.mean[:, :length]


def _padded_length(length: int) -> int:
    """``length`` up to the next multiple of ``_BASE``.

    In a compiled graph, where another number of blocks is another graph, up to 1, 2, 3, 4, 6, 8, ... times it.
    """
    if not torch.compiler.is_compiling():
        return length + -length % _BASE
    size = _BASE
    while size < length:
        size *= 2
    return size * 3 // 4 if size > 2 * _BASE and length <= size * 3 // 4 else size


def _second_halves(sums: WeightedMean, k: Tensor, v: Tensor, w: Tensor, pairs: int, size: int) -> WeightedMean:
    """The leading ``pairs`` pairs of blocks, the second of each merged with what it sees of the first."""
    whole = pairs * 2 * size
    # (T, T) -> (P, 2S, P, 2S) -> its diagonal blocks (P, 2S, 2S)
    blocks = w[:whole, :whole].view(pairs, 2 * size, pairs, 2 * size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    k, v, mean, log_weight = (x[:, :whole].unflatten(1, (pairs, 2, size)) for x in (k, v, *sums))  # (B, P, 2, S, d)
    before = _attend(k[:, :, 0], v[:, :, 0], blocks[:, size:, :size])
    second = merge(before, WeightedMean(mean[:, :, 1], log_weight[:, :, 1]))
    joined = (torch.stack([old[:, :, 0], new], dim=2) for old, new in zip((mean, log_weight), second))
    return WeightedMean(*(x.flatten(1, 3) for x in joined))  # (B, P, 2, S, d) -> (B, T', d)


def _base(k: Tensor, v: Tensor, w: Tensor) -> WeightedMean:
    """Blocks of ``_BASE`` tokens, each query over the keys of its block up to itself; O(T d _BASE) memory."""
    groups = k.shape[1] // _BASE
    blocks = w.view(groups, _BASE, groups, _BASE).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (G, b, b)
    later = torch.ones(_BASE, _BASE, dtype=torch.bool, device=k.device).triu(1)
    k, v = (x.unflatten(1, (groups, 1, _BASE)) for x in (k, v))  # (B, G, 1, b, d)
    logits = (k + blocks[..., None]).masked_fill(later[..., None], -torch.inf)  # (B, G, b, b, d)
    mean = (logits.softmax(3) * v).sum(3)  # (B, G, b, d)
    return WeightedMean(mean.flatten(1, 2), logits.logsumexp(3).flatten(1, 2))


def _step(history: State, w: PositionBias) -> Tensor:
    """The last token of ``history``, (B, 1, d); of w its row alone is formed, O(m (d + n)) for m tokens."""
    k, v, padding = history["k"].squeeze(1), history["v"].squeeze(1), history["padding_mask"]
    dtype, order = compute_dtype(k), real_first(padding)
    k, v = (take(zero_padding(x.to(dtype).unsqueeze(1), padding), order).squeeze(1) for x in (k, v))
    position = real_positions(padding)[:, -1]  # (B,)
    logits = k + _rows_of_bias(w, position, k.shape[1], dtype)[..., None]  # (B, m, d)
    later = torch.arange(k.shape[1], device=k.device) > position[:, None]
    weights = logits.masked_fill(later[..., None], -torch.inf).softmax(1)
    return (weights * v).sum(1, keepdim=True)


def _rows_of_bias(w: PositionBias, rows: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The first ``tokens`` entries of each of ``rows`` (B,) of ``w``: (B, tokens)."""
    first, last = (w, None) if isinstance(w, Tensor) else w
    chosen = first[rows.clamp(max=tokens - 1)].to(dtype)  # (B, N), or (B, n) of a factor
    return chosen[:, :tokens] if last is None else chosen @ last[:tokens].to(dtype).transpose(0, 1)
