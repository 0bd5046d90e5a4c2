"""Retention: linear attention without a feature map, in which each head has a fixed decay.

Sun, Dong, Huang, Ma, Xia, Xue, Wang, Wei, *Retentive Network: A Successor to Transformer for Large Language Models*,
2023, section 2.
"""

from typing import Any

import torch
from torch import Tensor

from ..shared.checks import check_choice, check_masks, check_positive_int, check_query_key_value
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_sums import causal_sums, state_shapes, step_by_kernels
from ..shared.packed import takes_segments
from ..shared.padding import real_positions, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, state_of_sums

#: How 1 - γ falls from head to head: 2^(-5 - h) for h = 0, 1, ... (equation 8), or from 1/32 to 1/512 for any H.
DECAYS = ("powers", "log_space")


@takes_segments("q", "k", "v")
def retention_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    decays: str = "powers",
    score_norm: bool = True,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Σ_(j <= i) R_ij v_j with R_ij = q_i·k_j / √d γ^(i - j), Eq. 5; ``decays`` selects the γ of heads, see ``DECAYS``.

    With ``score_norm`` ("Retention Score Normalization" of section 2.2) each row of γ^(i - j) is divided by the root of
    its sum s_i, and each row of R by max(|its sum|, 1). Both together divide row i by max(|Σ_j R_ij|, √s_i). A norm of
    each head's output cancels this, up to its ε. The caller rotates q and k by position. i - j counts real tokens. q, k
    (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; a padded query gives
    0, a padded key neither adds nor forgets. Cost: O(n (C + d) (d + e)) time, O(n C + (n / C) d e) memory with C =
    ``chunk_size``. ``initial_state`` and ``return_state`` continue a sequence: state ``sum_k`` (B, H, d), ``sum_kv``
    (B, H, d, e), float32, and ``count`` (B,), real tokens so far.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, name, number or state that does not fit; ``causal=False``.
    """
    check_choice("decays", decays, DECAYS)
    check_positive_int("chunk_size", chunk_size)
    if not isinstance(score_norm, bool):
        raise ValueError(f"score_norm is {score_norm!r}; allowed: True or False")
    if not causal:
        raise ValueError("causal is False; allowed for retention: True")
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    dtype = compute_dtype(q)
    state = state_of_sums(initial_state, {**state_shapes(q.shape[3], v), "count": (q.shape[0],)}, dtype, q)
    with autocast_off(q):
        queries = zero_padding(q.to(dtype), query_padding_mask) * q.shape[3] ** -0.5
        keys, values = (zero_padding(x.to(dtype), key_padding_mask) for x in (k, v))
        lost = _lost(q, decays)  # γ - 1, (H, 1)
        log_of_each = torch.log1p(lost)
        log_decay = log_of_each.to(dtype).expand(1, -1, q.shape[2])
        if key_padding_mask is not None:
            log_decay = log_decay.masked_fill(key_padding_mask[:, None], 0.0)
        before = None if state is None else {name: x for name, x in state.items() if name != "count"}
        out, weights, sums = causal_sums(queries, keys, values, chunk_size, before, log_decay, v.dtype)
        counts = _counts(q, key_padding_mask, None if state is None else state["count"])  # (B, n)
        if score_norm:
            terms = counts if key_padding_mask is None else counts.clamp(min=1)  # no token counts as one
            out = out / _normaliser(weights, log_of_each, lost, terms)
    out = out.to(v.dtype)
    return (out, {**sums, "count": counts[:, -1]}) if return_state else out


@step_of(retention_attention)
def _step(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, decays: str, score_norm: bool, **_: Any
) -> tuple[Tensor, State]:
    """``retention_attention`` of one token after ``state``; see ``step_of``."""
    lost, count = _lost(q, decays), state["count"] + 1
    log_of_each = torch.log1p(lost)
    tokens = q * q.shape[3] ** -0.5, k, v, log_of_each.to(q.dtype)[None]
    out, weights, sum_kv, sum_k = step_by_kernels(*tokens, state["sum_kv"], state["sum_k"])
    if score_norm:
        out = out / _normaliser(weights, log_of_each, lost, count[:, None])
    return out, {"sum_k": sum_k, "sum_kv": sum_kv, "count": count}


def _normaliser(weights: Tensor, log_of_each: Tensor, lost: Tensor, terms: Tensor) -> Tensor:
    """max(|weights|, √s) of each token, (B, H, n, 1); s = 1 + γ + ... of ``terms`` (B, n), (γ^terms - 1) / (γ - 1)."""
    decay_sum = torch.expm1(log_of_each * terms[:, None]) / lost  # (B, H, n)
    return torch.maximum(weights.abs(), decay_sum.sqrt().to(weights.dtype).unsqueeze(-1))


def _lost(q: Tensor, decays: str) -> Tensor:
    """γ - 1 (H, 1) of each head of q (B, H, n, d), in float64: minus the share that a head loses per token."""
    heads = q.shape[1]
    step = -1.0 if decays == "powers" else -4.0 / max(heads - 1, 1)  # else from 2^-5 to 2^-9
    powers = torch.arange(heads, device=q.device, dtype=torch.float64).unsqueeze(1) * step
    return torch.exp2(powers) * -(2.0**-5)


def _counts(q: Tensor, padding_mask: Tensor | None, before: Tensor | None) -> Tensor:
    """The number of real tokens up to and including each token: int64 (B, n)."""
    if before is not None and padding_mask is None and q.shape[2] == 1:
        return before[:, None] + 1
    if padding_mask is None:
        counts = torch.arange(1, q.shape[2] + 1, device=q.device).expand(q.shape[0], -1)
    else:
        counts = real_positions(padding_mask) + (~padding_mask).long()
    return counts if before is None else counts + before[:, None]
