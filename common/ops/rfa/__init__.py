"""Random feature attention (Peng et al., ICLR 2021), with and without its gate.

Legend, for every file of this folder:
    B batch, H heads, n queries, m keys, d channels of q and k, e channels of v, r random directions, C tokens of a
    chunk.
"""

from .interface import attend_source, rfa_attention, rfa_gate_attention, source_state

__all__ = ["attend_source", "rfa_attention", "rfa_gate_attention", "source_state"]
