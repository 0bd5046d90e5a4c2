"""The quadratic attention of the gated attention unit (FLASH, ICML 2022, section 2).

Legend, for every file of this folder:
    B batch, H heads, n tokens, m tokens with those of a state, s channels of q and k, e channels of v.
"""

from .interface import gau_attention

__all__ = ["gau_attention"]
