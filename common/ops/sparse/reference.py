"""Sparse Transformer, literally: the tokens that each query sees, and one softmax per query."""

from torch import Tensor

from ..shared.reference_tools import softmax_where


def sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: str = "fixed",
    stride: int,
    columns: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """One query at a time; arguments as in ``sparse_attention``. O(n²): for comparison only."""

    def sees(i: int, j: int, count: int) -> bool:
        if causal and j > i:
            return False
        if pattern == "fixed":
            return j // stride == i // stride or j % stride in range(stride - columns, stride)
        return abs(i - j) < stride or (i - j) % stride == 0

    return softmax_where(q, k, v, key_padding_mask, query_padding_mask, sees)
