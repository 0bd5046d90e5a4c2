"""Local attention: softmax over a window of tokens.

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, w tokens of a window.
"""

from .interface import local_attention

__all__ = ["local_attention"]
