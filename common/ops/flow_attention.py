"""Flow-Attention: attention as a flow network with conserved capacities, linear in the sequence length.

Wu, Wu, Xu, Wang, Long, *Flowformer: Linearizing Transformers with Conservation Flows*, ICML 2022, equations 4-8,
Algorithm 1 (not causal) and Algorithm 2 (causal). Legend, used throughout: B batch, H heads, n sinks (queries),
m sources (keys), d channels of q and k, e channels of v, C chunk length, G = ceil(n / C) chunks.
"""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from .checks import State, check_padding_mask, check_positive_int, check_query_key_value, check_state
from .chunks import autocast_off, compute_dtype
from .flow_attention_causal import causal_attention
from .flow_attention_causal_chunks import (
    CausalInput,
    causal_flow,
    chunk_features,
    chunk_positions,
    chunk_scores,
    joined,
    state_shapes,
)
from .flow_attention_full import full_flow
from .flow_attention_full_pieces import full_attention
from .flow_options import flow_options


def flow_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Optional[Tensor] = None,
    query_padding_mask: Optional[Tensor] = None,
    form: str = "released",
    clamp: Optional[float] = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
    chunk_size: int = 64,
    initial_state: Optional[State] = None,
    return_state: bool = False,
) -> Union[Tensor, Tuple[Tensor, State]]:
    """Flow-Attention of q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e), in v's dtype.

    Incoming flow I_i = phi(q_i)·Σ_j phi(k_j) and outgoing flow O_j = phi(k_j)·Σ_i phi(q_i) (Eq. 4-5), conserved
    Î_i = phi(q_i)·Σ_j phi(k_j)/O_j and Ô_j = phi(k_j)·Σ_i phi(q_i)/I_i (Eq. 6-7), then
    R_i = sigmoid(Î_i) · phi(q_i)/I_i · Σ_j phi(k_j)ᵀ softmax(Ô)_j v_j (Eq. 8). Causal (Algorithm 2), every sum
    runs over j <= i and is divided by the number of real tokens up to i.

    Masks: bool, ``key_padding_mask`` (B, m), ``query_padding_mask`` (B, n), True = padding. Padding on either side
    never changes a real token's output and its own output is 0, all-padding rows included; in self-attention pass
    the same mask for both. Causal, a token is padding when either mask says so.

    Args:
        form: "paper" is Algorithms 1 and 2 to the letter; "released" adds the authors' 1e-6 to q, k and the sums,
            multiplies the softmax by m and Î by n/m; "released_vision" adds 1e-6 to every flow as well.
        clamp: bound on the size of Ô in the released forms; "paper" has none and ignores it. Part of the trained model:
            1 in the authors' core module and image model, 5 in their fairseq language model, 10 in their RL model,
            none (None or inf) in their long-range-arena code.
        phi: "sigmoid", "elu+1" or "relu" (plus 1e-6) (Table 10).
        competition: "softmax" over the sources, "sigmoid" or "none" (Table 11). (The authors' long-range-arena
            code takes its softmax over heads; that is not offered.)
        allocation: "sigmoid", "softmax" over the sinks or "none" (Table 11); the softmax is multiplied by the
            number of sinks where the competition is by the number of sources.
        chunk_size: C of the causal form, any length; results do not depend on it.
        initial_state: causal; the state of the tokens before these, as returned. One token, or a piece of a
            prompt, continues a sequence exactly.
        return_state: causal; also return the state after the last token: ``count`` (B,), ``sum_k``, ``sum_q``,
            ``sum_k_over_outgoing``, ``sum_q_over_incoming`` (B, H, d), ``log_competition``, ``log_allocation``
            (B, H), ``sum_kv`` (B, H, d, e). float32 and of constant size; the batch is dimension 0 of each.

    Cost: O(n d e) time; causal, O(n (C + d) + (n / C) d e) memory, nothing of size n x n. Sums and normalisers are
    float32 (float64 for float64 inputs) whatever the input, autocast included.

    Raises:
        ValueError: a shape, dtype, mask, name, clamp, chunk size or state that does not fit; a state without causal.
    """
    options = flow_options(form, clamp, phi, competition, allocation)
    _check_inputs(q, k, v, causal, key_padding_mask, query_padding_mask, chunk_size)
    if not causal and (initial_state is not None or return_state):
        raise ValueError("initial_state and return_state are given with causal=False; allowed: only with causal=True")
    with autocast_off(q):
        if not causal:
            return full_attention(q, k, v, key_padding_mask, query_padding_mask, options)
        check_state(initial_state, state_shapes(q, v), compute_dtype(q), q)
        padding = _either(key_padding_mask, query_padding_mask)
        out, state = causal_attention(CausalInput(q, k, v, padding, options, chunk_size, initial_state))
    out = out.to(v.dtype)
    return (out, state) if return_state else out


def flow_attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Optional[Tensor] = None,
    query_padding_mask: Optional[Tensor] = None,
    form: str = "released",
    clamp: Optional[float] = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
    chunk_size: int = 64,
) -> Tuple[Tensor, Tensor]:
    """The competition weight of every source (B, H, m) and allocation weight of every sink (B, H, n) (Figures 4-9).

    Exactly what ``flow_attention`` with the same arguments multiplies the values and the result with, so the
    released softmax competition is around 1, not around 1/m. 0 at padding. Cost and errors as there.
    """
    options = flow_options(form, clamp, phi, competition, allocation)
    _check_inputs(q, k, k, causal, key_padding_mask, query_padding_mask, chunk_size)
    with autocast_off(q):
        dtype = compute_dtype(q)
        if not causal:
            flow = full_flow(q.to(dtype), k.to(dtype), key_padding_mask, query_padding_mask, options)
            sources, sinks = flow.competition, flow.allocation
        else:
            key_padding_mask = query_padding_mask = _either(key_padding_mask, query_padding_mask)
            length, size = q.shape[2], min(chunk_size, q.shape[2])
            positions = chunk_positions(q, key_padding_mask, size, None)
            features = chunk_features(q, k, phi, key_padding_mask, size)
            flow, _ = causal_flow(features, chunk_scores(features), positions, options, None)
            sources, sinks = joined(flow.competition, length), joined(flow.allocation, length)
    if key_padding_mask is not None:
        sources = sources.masked_fill(key_padding_mask[:, None], 0.0)
    if query_padding_mask is not None:
        sinks = sinks.masked_fill(query_padding_mask[:, None], 0.0)
    return sources, sinks


def flow_attention_map(q: Tensor, k: Tensor, *, causal: bool = False, max_tokens: int = 4096, **options) -> Tensor:
    """The attention map (B, H, n, m) that Flow-Attention never forms: ``map @ v`` is its output.

    For looking at short inputs: O(n m) memory, ``options`` and errors as in ``flow_attention``.

    Raises:
        ValueError: also for more than ``max_tokens`` sinks or sources.
    """
    check_query_key_value(q, k, k, causal)
    n, m, dtype = q.shape[2], k.shape[2], compute_dtype(q)
    if max(n, m) > max_tokens:
        raise ValueError(f"q and k have {n} and {m} tokens; allowed: at most max_tokens={max_tokens} each")
    # One-hot values carry each source's share through unmixed.
    identity = torch.eye(m, dtype=dtype, device=k.device).expand(*k.shape[:2], m, m)
    return flow_attention(q.to(dtype), k.to(dtype), identity, causal=causal, **options)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_padding_mask: Optional[Tensor],
    query_padding_mask: Optional[Tensor],
    chunk_size: int,
) -> None:
    check_query_key_value(q, k, v, causal)
    check_padding_mask("key_padding_mask", key_padding_mask, k)
    check_padding_mask("query_padding_mask", query_padding_mask, q)
    check_positive_int("chunk_size", chunk_size)


def _either(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """Padding by either mask; a causal token is source and sink at once."""
    if a is None or b is None or a is b:
        return a if b is None else b
    return a | b
