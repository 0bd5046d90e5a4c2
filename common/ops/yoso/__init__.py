"""YOSO-E, attention by the probability of equal hashes (You Only Sample (Almost) Once, ICML 2021).

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v.
"""

from .interface import GRADIENTS, yoso_attention

__all__ = ["GRADIENTS", "yoso_attention"]
