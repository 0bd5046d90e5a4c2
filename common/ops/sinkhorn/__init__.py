"""Sparse Sinkhorn attention (Tay, Bahri, Yang, Metzler, Juan, ICML 2020).

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, C tokens of a chunk, G chunks of the input,
    M chunks of the longest input.
"""

from .interface import NORMALISERS, SORTS, sinkhorn_attention

__all__ = ["NORMALISERS", "SORTS", "sinkhorn_attention"]
