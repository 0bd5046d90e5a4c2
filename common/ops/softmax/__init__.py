"""Softmax attention by torch's fused kernels.

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v.
"""

from .interface import softmax_attention

__all__ = ["softmax_attention"]
