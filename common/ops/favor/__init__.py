"""FAVOR+, the attention of the Performer (Choromanski et al., ICLR 2021).

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v, r random directions, C tokens of a
    chunk.
"""

from .interface import LENGTHS, attend_source, draw_directions, favor_attention, source_state

__all__ = ["LENGTHS", "attend_source", "draw_directions", "favor_attention", "source_state"]
