"""Hedgehog (Zhang et al., ICLR 2024): linear attention whose learned features are spiky, as softmax weights are.

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v, r rows of a map, C tokens of a chunk.
"""

from .interface import attend_source, hedgehog_attention, source_state

__all__ = ["attend_source", "hedgehog_attention", "source_state"]
