"""Sparse Transformer: softmax over a window of tokens and over every l-th token, or over a chunk and columns.

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, l the stride, c columns, G chunks of l tokens.
"""

from .interface import sparse_attention
from .pattern import PATTERNS

__all__ = ["PATTERNS", "sparse_attention"]
