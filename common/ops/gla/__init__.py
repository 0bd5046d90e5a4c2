"""Gated linear attention (Yang et al., ICML 2024).

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, r rank of the gate, D width, C tokens of a
    chunk.
"""

from .interface import gla_attention

__all__ = ["gla_attention"]
