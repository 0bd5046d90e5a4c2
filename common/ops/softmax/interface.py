"""Softmax attention by ``scaled_dot_product_attention``, with padding on either side and a state.

Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser, Polosukhin, *Attention Is All You Need*, NeurIPS 2017,
equation 1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import check_masks, check_query_key_value
from ..shared.kv_cache import extend_kv_cache
from ..shared.packed import takes_segments
from ..shared.padding import padding_or_none, zero_padding
from ..shared.state import State, check_continuation


@takes_segments("q", "k", "v")
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    dropout_p: float = 0.0,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """softmax(q·k / √d) v over all keys, or over those up to the query when causal.

    q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, m) and (B, n), True =
    padding; a padded query gives 0, and so does a query that sees no key. ``dropout_p`` drops individual weights. Cost:
    O(n m (d + e)) time, and O(n m) memory if a mask and ``causal`` are combined, otherwise O(n + m).
    ``initial_state`` and ``return_state`` (causal) continue a sequence: the state holds all tokens so far, ``k``, ``v``
    and ``padding_mask`` (B, m), so it grows.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask or state that does not fit, or a state without ``causal``.
    """
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    # A NaN in padding would pass through any mask: 0 * NaN is NaN.
    q = zero_padding(q, query_padding_mask)
    k, v = zero_padding(k, key_padding_mask), zero_padding(v, key_padding_mask)
    state, padding = None, key_padding_mask
    if initial_state is not None or return_state:
        state = extend_kv_cache({"k": k, "v": v}, key_padding_mask, initial_state)
        # Earlier tokens may have another dtype, for example without autocast: cast them to that of q.
        k, v, padding = state["k"].to(q.dtype), state["v"].to(q.dtype), state["padding_mask"]
        if q.shape[2] == 1:
            padding = padding_or_none(padding)
            causal = causal and padding is not None  # a single token sees all earlier tokens
    if padding is None:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal)
    else:
        out = _masked(q, k, v, padding, causal, dropout_p)
    out = zero_padding(out, query_padding_mask)
    return (out, state) if return_state else out


def _masked(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor, causal: bool, dropout_p: float) -> Tensor:
    """Attention (B, H, n, e) to real keys only, 0 without real keys.

    If causal, the n queries are the last n of the m tokens.
    """
    n, m = q.shape[2], k.shape[2]
    visible = ~key_padding_mask[:, None, None, :]  # (B, 1, 1, m)
    if causal:
        visible = visible & torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)  # (B, 1, n, m)
    blind = ~visible.any(-1, keepdim=True)
    # A row without visible keys would be NaN, also in the backward pass: it sees everything, and its output is cleared.
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | blind, dropout_p=dropout_p)
    return out.masked_fill(blind, 0.0)
