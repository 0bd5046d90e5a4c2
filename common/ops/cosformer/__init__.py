"""cosFormer (Qin et al., ICLR 2022).

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v, C tokens of a chunk,
    M the largest position that the cosine is made for.
"""

from .interface import MAPS, attend_source, cosformer_attention, source_state

__all__ = ["MAPS", "attend_source", "cosformer_attention", "source_state"]
