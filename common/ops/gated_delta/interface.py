"""The gated delta rule: a decaying memory, in which a key's old value is erased before its new value is written.

Yang, Kautz, Hatamizadeh, *Gated Delta Networks: Improving Mamba2 with Delta Rule*, ICLR 2025; without the gate Yang,
Wang, Zhang, Shen, Kim, *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*, NeurIPS 2024,
after Schlag, Irie, Schmidhuber, *Linear Transformers Are Secretly Fast Weight Programmers*, ICML 2021.
"""

from typing import Any

import torch
from torch import Tensor

from ..shared.checks import check_choice, check_masks, check_of_tokens, check_positive_int, check_query_key_value
from ..shared.cpu.dispatch import step_of
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.state import State, state_of_sums
from .causal import CHUNK_SIZE
from .cpu.causal import applies, delta_by_kernels, step_by_kernels
from .decoding import delta_step
from .directions import ACTIVATIONS, QK_NORMS, directed
from .rule import delta_rule


@takes_segments("q", "k", "v", "beta", "log_decay")
def gated_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
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
    """o_t = S_t q_t / √d with S_t = α_t S_(t-1) (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ (section 3.1), causal alone.

    q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. ``beta`` (B, H, n) is β, from 0 to 1, or to 2 where
    eigenvalues may be negative. ``log_decay`` (B, H, n) is log α <= 0; without it α = 1, DeltaNet. ``qk_activation``
    and ``v_activation`` are applied to q, k and v, and ``qk_norm="l2"`` then makes q and k unit vectors,
    x / √(|x|² + 1e-6). Without it a key with β |k|² > 2 makes the memory grow. Masks: bool (B, n), True = padding; a
    padded query gives 0, a padded key neither adds, erases nor decays. Cost: O(n (C (C + d + e) + d e)) time and
    O(n (d + e) + (n / C) d e) memory with C = ``chunk_size``, which changes no result. ``initial_state`` and
    ``return_state`` continue a sequence: state ``memory`` (B, H, d, e), Sᵀ, float32.

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
    if log_decay is not None:
        check_of_tokens("log_decay", log_decay, q)
    dtype, out_dtype, shape = compute_dtype(q), v.dtype, (*k.shape[:2], k.shape[3], v.shape[3])
    state = state_of_sums(initial_state, {"memory": shape}, dtype, q)
    memory = None if state is None else state["memory"]
    with autocast_off(q):
        q, k, v, beta, log_decay = (None if x is None else in_dtype(x, dtype) for x in (q, k, v, beta, log_decay))
        if key_padding_mask is not None:
            k, v = zero_padding(k, key_padding_mask), zero_padding(v, key_padding_mask)
            beta, log_decay = _of_real(beta, key_padding_mask), _of_real(log_decay, key_padding_mask)
        tensors = zero_padding(q, query_padding_mask), k, v, beta, log_decay, memory
        out, memory = _attend(tensors, (qk_activation, qk_norm, v_activation), chunk_size, out_dtype)
    out = in_dtype(out, out_dtype)
    return (out, {"memory": memory}) if return_state else out


@step_of(gated_delta_attention)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    qk_activation: str,
    qk_norm: str,
    v_activation: str,
    **_: Any,
) -> tuple[Tensor, State]:
    """``gated_delta_attention`` of one token after ``state``; see ``step_of``."""
    options = qk_activation, qk_norm, v_activation
    out, memory = step_by_kernels(q, k, v, beta, log_decay, state["memory"], *options)
    return out, {"memory": memory}


def _attend(
    tensors: tuple[Tensor | None, ...], directions: tuple[str, str, str], chunk_size: int, precision: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The outputs of q, k, v, beta and log_decay after the memory, the last of ``tensors``, and the new memory."""
    if applies(*tensors):
        return delta_by_kernels(*tensors, *directions)
    *tokens, beta, log_decay, memory = tensors
    queries, keys, values = directed(*tokens, *directions)
    if memory is not None and queries.shape[2] == 1:
        return delta_step(queries, keys, values, beta, log_decay, memory)
    memory = keys.new_zeros(*keys.shape[:2], keys.shape[3], values.shape[3]) if memory is None else memory
    return delta_rule(queries, keys, values, beta, log_decay, memory, chunk_size, precision)


def _of_real(x: Tensor | None, padding_mask: Tensor) -> Tensor | None:
    """``x`` (B, H, n), 0 at padding: nothing is written there, and nothing decays."""
    return None if x is None else x.masked_fill(padding_mask[:, None], 0.0)
