"""Longformer, literally: the tokens that each query sees, and one softmax per query."""

from torch import Tensor

from ..shared.reference_tools import softmax_where


def longformer_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    global_tokens: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """One query at a time; arguments as in ``longformer_attention``. O(n²): for comparison only."""

    def sees(i: int, j: int, count: int) -> bool:
        if causal:
            return j <= i and (i - window < j or j < global_tokens)
        near = i - window // 2 <= j <= i + (window - 1) // 2
        return near or j < global_tokens or i < global_tokens

    return softmax_where(q, k, v, key_padding_mask, query_padding_mask, sees)
