"""Transformer to RNN, T2R (Kasai et al., EMNLP 2021): linear attention with a learned feature map.

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v, f features, C tokens of a chunk.
"""

from .interface import attend_source, source_state, t2r_attention

__all__ = ["attend_source", "source_state", "t2r_attention"]
