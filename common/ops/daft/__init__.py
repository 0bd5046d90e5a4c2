"""DAFT: attention without dot products, by key and by position (*A Dot Product Attention Free Transformer*).

Legend, for every file of this folder:
    B batch, T tokens, d channels, h heads, c = d / h channels of a head, C tokens of a chunk, G = ceil(T / C) chunks.
    In an image T = H W, rows and columns.

Three functions: ``full`` has a bias for every pair of positions, ``conv`` a filter over distances in a window, and
``select`` a filter with one entry. ``README.md`` has the algorithms.
"""

from .conv import daft_conv
from .full import daft_full
from .select import daft_select

__all__ = ["daft_conv", "daft_full", "daft_select"]
