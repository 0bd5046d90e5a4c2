"""Linformer (Wang et al., 2020): softmax attention to learned sums of keys and values.

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, M the most keys, d channels of q and k, e channels of v, p sums of keys.
"""

from .interface import linformer_attention

__all__ = ["linformer_attention"]
