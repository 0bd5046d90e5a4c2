"""Row-major axial Combiner (Ren et al., NeurIPS 2021).

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, R tokens of a row, G = ceil(n / R) rows.
"""

from .interface import combiner_attention, row_attention

__all__ = ["combiner_attention", "row_attention"]
