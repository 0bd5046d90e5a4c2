"""Longformer: softmax over a window of tokens, and over global ones that see and are seen by all.

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, w tokens of a window, g global tokens.
"""

from .interface import longformer_attention

__all__ = ["longformer_attention"]
