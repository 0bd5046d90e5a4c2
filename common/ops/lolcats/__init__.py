"""Softmax attention in a window and linear attention to all other tokens, under one normaliser (LoLCATs, ICLR 2025).

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, w tokens of a window, r rows of a map,
    f features, C tokens of a chunk, S tokens of a block, G blocks, K keys that a block of queries is compared with.
"""

from .interface import PARTS, lolcats_attention

__all__ = ["PARTS", "lolcats_attention"]
