"""FAVOR+: softmax attention estimated by positive random features, in linear time.

Choromanski, Likhosherstov, Dohan, Song, Gane, Sarlos, Hawkins, Davis, Mohiuddin, Kaiser, Belanger, Colwell, Weller,
*Rethinking Attention with Performers*, ICLR 2021, section 2.3 (positive features) and 2.4 (orthogonal directions).
"""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ..shared.checks import check_masks, check_positive_int, check_query_key_value, shape_of
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_sums import (
    causal_sums,
    full_sums,
    read_source,
    state_shapes,
    step_by_kernels,
    sums_of_source,
)
from ..shared.forgetting import check_log_decay, decay_of_real_tokens
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, check_continuation, state_of_source, state_of_sums

#: Length of a direction: that of a Gaussian vector, for an unbiased kernel, or √d, the paper's regularised variant.
LENGTHS = ("gaussian", "sqrt_d")
#: The largest exponent if there is no key: below that of any key, and well inside the range of float32.
_NONE = -1e30


@takes_segments("q", "k", "v", "log_decay")
def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    *,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Σ_j phi(q_i)·phi(k_j) v_j / Σ_j phi(q_i)·phi(k_j), over all j, or j <= i when causal.

    phi(x)_s = exp(w_s·x' - |x'|²/2) / √r with x' = x / d^(1/4) and w_s a row of ``directions`` (r, d), from
    ``draw_directions``: phi(q)·phi(k) is exp(q·k / √d) in expectation. q (B, H, n, d), k (B, H, m, d),
    v (B, H, m, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, m) and (B, n), True = padding; a padded query gives 0,
    and so does a query without keys. Cost: O(n r (d + e)) time and, causal, O(n (C + r) + (n / C) r e) memory with C =
    ``chunk_size``. ``initial_state`` and ``return_state`` (causal) continue a sequence: state ``log_max`` (B, H),
    ``sum_k`` (B, H, r), ``sum_kv`` (B, H, r, e), float32. ``log_decay`` (causal) makes the sums decay: before token t
    is added they are multiplied by exp(log_decay_t). It is (B, H, n), one gate per head, or (B, H, n, r), one per
    feature; with the latter, ``log_max`` is (B, H, r).

    Exponents are relative to the largest one, which cancels: nothing overflows, and in causal attention no token
    depends on a later one. The README describes what underflows, and the difference from the authors' code.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask or state that does not fit, or a state or gates without ``causal``.
    """
    check_positive_int("chunk_size", chunk_size)
    check_query_key_value(q, k, v, causal)
    _check_directions("q", q, directions)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    check_log_decay(log_decay, causal, q, len(directions))
    dtype, by_feature = compute_dtype(q), log_decay is not None and log_decay.dim() == 4
    vector = (*q.shape[:2], len(directions))
    shapes = {"log_max": vector if by_feature else vector[:2], **state_shapes(len(directions), v)}
    state = state_of_sums(initial_state, shapes, dtype, q)
    with autocast_off(q):
        projected = _projected(q, directions, query_padding_mask)[1]
        values = zero_padding(v.to(dtype), key_padding_mask)
        if not causal:
            keys, log_scale = _key_features(k, directions, key_padding_mask)
            queries = _relative_features(projected + log_scale.unsqueeze(2), query_padding_mask)
            return _divided(*full_sums(queries, keys, values)).to(v.dtype)
        log_decay = decay_of_real_tokens(log_decay, key_padding_mask, dtype)
        exponents = _exponents(k, directions, key_padding_mask)
        keys, log_max, log_decay = _causal_keys(exponents, key_padding_mask, state, log_decay)
        # If each feature has its own unit, queries add its logarithm to their exponents.
        queries = _relative_features(projected + log_max if by_feature else projected, query_padding_mask)
        out, weights, sums = causal_sums(queries, keys, values, chunk_size, state, log_decay, v.dtype)
    out = _divided(out, weights).to(v.dtype)
    return (out, {"log_max": log_max[:, :, -1], **sums}) if return_state else out


@step_of(favor_attention)
def _step(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, directions: Tensor, log_decay: Tensor | None = None, **_: Any
) -> tuple[Tensor, State]:
    """``favor_attention`` of one token after ``state``; see ``step_of``."""
    by_feature = log_decay is not None and log_decay.dim() == 4
    queries = _projected(q, directions, None)[1]
    keys, log_max, decay = _causal_keys(_exponents(k, directions, None), None, state, log_decay)
    queries = _relative_features(queries + log_max if by_feature else queries, None)
    out, weights, sum_kv, sum_k = step_by_kernels(queries, keys, v, decay, state["sum_kv"], state["sum_k"])
    return _divided(out, weights), {"log_max": log_max[:, :, -1], "sum_k": sum_k, "sum_kv": sum_kv}


def draw_directions(count: int, channels: int, lengths: str, generator: Generator | None = None) -> Tensor:
    """Random directions (r, d), each distributed as a Gaussian vector, in orthogonal blocks of at most d rows; O(r d²).

    They are drawn from torch's generator or from ``generator``.
    """
    device = None if generator is None else generator.device  # not torch's default device, which may differ
    blocks = []
    for begin in range(0, count, channels):
        gaussian = torch.randn(channels, channels, generator=generator, device=device)
        rotation, triangle = torch.linalg.qr(gaussian)
        # These signs make all rotations equally likely.
        blocks.append((rotation * triangle.diagonal().sign()).T[: count - begin])
    if lengths == "sqrt_d":
        return torch.cat(blocks) * channels**0.5
    gaussian = torch.randn(count, channels, generator=generator, device=device)
    return torch.cat(blocks) * gaussian.norm(dim=1, keepdim=True)


def source_state(k: Tensor, v: Tensor, key_padding_mask: Tensor | None, directions: Tensor) -> State:
    """State of a source: ``log_scale``, ``sum_k`` (B, H, r), ``sum_kv`` (B, H, r, e), float32; O(m r e).

    k (B, H, m, d), v (B, H, m, e), ``key_padding_mask`` (B, m), True = padding. The sums of a direction are in units of
    exp(``log_scale``), its largest feature. Only ``directions`` are checked (ValueError).
    """
    _check_directions("k", k, directions)
    with autocast_off(k):
        keys, log_scale = _key_features(k, directions, key_padding_mask)
        return {"log_scale": log_scale, **sums_of_source(keys, v, key_padding_mask)}


def attend_source(q: Tensor, state: State, query_padding_mask: Tensor | None, directions: Tensor) -> Tensor:
    """``favor_attention`` of q (B, H, n, d) to the source of ``source_state`` -> (B, H, n, e) in q's dtype; O(n r e).

    ``query_padding_mask`` (B, n), True = padding, gives 0. ``directions`` are those of the state. Only they and
    ``state`` are checked (ValueError).
    """
    _check_directions("q", q, directions)
    with autocast_off(q):
        projected = _projected(q, directions, query_padding_mask)[1]
        state = state_of_source(state, ("log_scale", "sum_k"), projected)
        queries = _relative_features(projected + state["log_scale"].unsqueeze(2), query_padding_mask)
        values, weights = read_source(queries, {name: state[name] for name in ("sum_k", "sum_kv")})
        return _divided(values, weights).to(q.dtype)


def _projected(x: Tensor, directions: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x' (B, H, n, d) and w·x' (B, H, n, r), in float32 or float64."""
    dtype = compute_dtype(x)
    x = zero_padding(x.to(dtype), padding_mask) * x.shape[3] ** -0.25
    return x, x @ directions.to(dtype).transpose(0, 1)


def _relative_features(exponents: Tensor, padding_mask: Tensor | None) -> Tensor:
    """exp(``exponents``), (B, H, n, r), up to a factor of each query, which cancels; 0 at padding."""
    return zero_padding((exponents - exponents.detach().amax(-1, keepdim=True)).exp(), padding_mask)


def _key_features(k: Tensor, directions: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """phi(k) relative to the largest feature of each direction: (B, H, m, d) -> (B, H, m, r), 0 at padding; its log.

    Queries add the logarithm (B, H, r) to their exponents, so the largest summand of each quotient is at least 1.
    """
    exponents = _exponents(k, directions, padding_mask)
    log_scale = exponents.detach().amax(2)
    return zero_padding((exponents - log_scale.unsqueeze(2)).exp(), padding_mask), log_scale


def _exponents(k: Tensor, directions: Tensor, padding_mask: Tensor | None) -> Tensor:
    """log(√r phi(k)): (B, H, m, d) -> (B, H, m, r); padding has the value for no key."""
    scaled, projected = _projected(k, directions, padding_mask)
    exponents = projected - scaled.square().sum(-1, keepdim=True) / 2
    if padding_mask is None:
        return exponents
    return exponents.masked_fill(padding_mask[:, None, :, None], _NONE)


def _causal_keys(
    exponents: Tensor, padding_mask: Tensor | None, state: State | None, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Key features relative to the largest exponent so far, that exponent, and the log decay of earlier sums.

    ``exponents`` (B, H, n, r) -> (B, H, n, r), (B, H, n), (B, H, n): sums are in units of exp(largest so far), and
    shrink when a token raises it. With ``log_decay`` the largest decays too, so that a forgotten key never hides a
    later one: largest_t = max(largest_(t-1) + log_decay_t, own_t). With one gate per feature it is (B, H, n, r).
    """
    by_feature = log_decay is not None and log_decay.dim() == 4
    own = exponents.detach() if by_feature else exponents.detach().amax(-1)  # (B, H, n) or (B, H, n, r)
    before = torch.full_like(own[:, :, :1], _NONE) if state is None else state["log_max"].unsqueeze(2)
    largest = torch.cat([before, own], dim=2)
    if log_decay is not None:
        # Rounding here only changes the unit, which cancels: everything below uses the same unit.
        since_start = F.pad(log_decay.detach(), (0, 0, 1, 0) if by_feature else (1, 0)).cumsum(2)
        largest = (largest - since_start).cummax(2).values + since_start
    else:
        largest = largest.cummax(2).values
    earlier, largest = largest[:, :, :-1], largest[:, :, 1:]
    keys = zero_padding((exponents - (largest if by_feature else largest.unsqueeze(-1))).exp(), padding_mask)
    decay = earlier - largest
    return keys, largest, decay if log_decay is None else decay + log_decay


def _divided(values: Tensor, weights: Tensor) -> Tensor:
    """``values`` (B, H, n, e) divided by their ``weights`` (B, H, n, 1), 0 where these are almost 0."""
    vanishing = weights < 1e-30  # below this, the gradient of the quotient might not be finite in float32
    return values.masked_fill(vanishing, 0.0) / weights.masked_fill(vanishing, 1.0)


def _check_directions(name: str, x: Tensor, directions: Tensor) -> None:
    if not isinstance(directions, Tensor) or directions.dim() != 2 or directions.shape[1] != x.shape[3]:
        allowed = f"(features, channels of {name})"
        raise ValueError(f"{name} has {x.shape[3]} channels and directions {shape_of(directions)}; allowed: {allowed}")
