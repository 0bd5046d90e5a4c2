"""Local attention, literally: the tokens that each query sees, and one softmax per query."""

from torch import Tensor

from ..shared.reference_tools import softmax_where


def local_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    chunked: bool = False,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """One query at a time; arguments as in ``local_attention``. O(n²): for comparison only."""

    def sees(i: int, j: int, count: int) -> bool:
        if causal and j > i:
            return False
        if chunked:
            return j // window == i // window
        return i - window < j if causal else i - window // 2 <= j <= i + (window - 1) // 2

    return softmax_where(q, k, v, key_padding_mask, query_padding_mask, sees)
