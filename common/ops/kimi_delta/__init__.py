"""Kimi Delta Attention (Kimi Team, 2025): the gated delta rule with a decay for each channel of the keys.

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, C tokens of a chunk.
"""

from .interface import kimi_delta_attention

__all__ = ["kimi_delta_attention"]
