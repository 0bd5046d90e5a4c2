"""Linear attention (Katharopoulos et al., ICML 2020).

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v, C tokens of a chunk.
"""

from .interface import CUMULATIVE_SUMS, attend_source, linear_attention, source_state

__all__ = ["CUMULATIVE_SUMS", "attend_source", "linear_attention", "source_state"]
