"""Synthesizer (Tay et al., ICML 2021): attention whose weights no query and key make.

Legend, for every file of this folder:
    B batch, H heads, n tokens, M the most tokens, e channels of v, c features of a token or position.
"""

from .interface import synthesizer_attention

__all__ = ["synthesizer_attention"]
