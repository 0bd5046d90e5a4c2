"""Kimi Delta Attention: a memory whose channels decay by themselves, and from which a key's old value is erased.

Kimi Team, *Kimi Linear: An Expressive, Efficient Attention Architecture*, arXiv 2510.26692, 2025.
"""

from typing import Any

from torch import Tensor

from ..gated_delta.causal import CHUNK_SIZE
from ..gated_delta.decoding import delta_step
from ..gated_delta.directions import ACTIVATIONS, QK_NORMS, directed
from ..gated_delta.rule import delta_rule
from ..shared.checks import (
    check_choice,
    check_masks,
    check_of_tokens,
    check_positive_int,
    check_query_key_value,
    shape_of,
)
from ..shared.cpu.dispatch import step_of
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.state import State, state_of_sums


@takes_segments("q", "k", "v", "beta", "log_decay")
def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    qk_activation: str = "silu",
    qk_norm: str = "l2",
    v_activation: str = "silu",
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """o_t = S_tᵀ q_t / √d with S_t = (I - β_t k_t k_tᵀ) Diag(α_t) S_(t-1) + β_t k_t v_tᵀ (equation 1), causal alone.

    The paper does not divide by √d; the norm that follows in its layer (equation 10) cancels such a factor.

    q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. ``beta`` (B, H, n) is β, from 0 to 1. ``log_decay``
    (B, H, n, d) is log α <= 0 of each channel of the keys. ``qk_activation`` and ``v_activation`` are applied to q, k
    and v, and ``qk_norm="l2"`` then makes q and k unit vectors, x / √(|x|² + 1e-6). Masks: bool (B, n), True = padding;
    a padded query gives 0, a padded key neither adds, erases nor decays. Cost: O(n (C (C + d + e) + d e)) time and
    O(n (d + e) log C + (n / C) d e) memory with C = ``chunk_size``, rounded up to a power of two. ``initial_state`` and
    ``return_state`` continue a sequence: state ``memory`` (B, H, d, e), S, float32.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, name, number or state that does not fit; ``causal=False``.
    """
    for name, value in (("qk_activation", qk_activation), ("v_activation", v_activation)):
        check_choice(name, value, ACTIVATIONS)
    check_choice("qk_norm", qk_norm, QK_NORMS)
    check_positive_int("chunk_size", chunk_size)
    if not causal:
        raise ValueError(f"causal is {causal}; allowed for the delta rule: True")
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_of_tokens("beta", beta, q)
    if not isinstance(log_decay, Tensor) or log_decay.shape != k.shape:
        raise ValueError(f"log_decay is {shape_of(log_decay)}; allowed: the shape of k, {tuple(k.shape)}")
    check_of_tokens("log_decay", log_decay[..., 0], q)
    dtype, out_dtype, shape = compute_dtype(q), v.dtype, (*k.shape[:2], k.shape[3], v.shape[3])
    state = state_of_sums(initial_state, {"memory": shape}, dtype, q)
    with autocast_off(q):
        q, k, v, beta, log_decay = (in_dtype(x, dtype) for x in (q, k, v, beta, log_decay))
        k, v, log_decay = (zero_padding(x, key_padding_mask) for x in (k, v, log_decay))
        beta = zero_padding(beta.unsqueeze(-1), key_padding_mask).squeeze(-1)  # nothing is written there
        q, k, v = directed(zero_padding(q, query_padding_mask), k, v, qk_activation, qk_norm, v_activation)
        if state is not None and q.shape[2] == 1:
            out, memory = delta_step(q, k, v, beta, log_decay, state["memory"])
        else:
            memory = k.new_zeros(shape) if state is None else state["memory"]
            out, memory = delta_rule(q, k, v, beta, log_decay, memory, chunk_size, out_dtype)
    out = in_dtype(out, out_dtype)
    return (out, {"memory": memory}) if return_state else out


@step_of(kimi_delta_attention)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    beta: Tensor,
    log_decay: Tensor,
    qk_activation: str,
    qk_norm: str,
    v_activation: str,
    **_: Any,
) -> tuple[Tensor, State]:
    """``kimi_delta_attention`` of one token after ``state``; see ``step_of``."""
    tokens = directed(q, k, v, qk_activation, qk_norm, v_activation)
    out, memory = delta_step(*tokens, beta, log_decay, state["memory"])
    return out, {"memory": memory}
