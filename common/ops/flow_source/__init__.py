"""Flow-Attention to a source that has its own flows: cross-attention for decoders. Our own addition, not in a paper.

Legend, for every file of this folder:
    B batch, H heads, n sinks (queries of the targets), m sources (keys) and as many queries of their own,
    d channels of queries and keys, e channels of v.
    I, O: flows into the sinks and out of the sources; Î, Ô: the same, conserved.

The flows, their options and their constants are those of ``ops/flow``, whose README has the derivation.
"""

from .interface import (
    ALLOCATIONS,
    COMPETITIONS,
    attend_source,
    flow_source_attention,
    flow_source_options,
    source_state,
)

__all__ = [
    "ALLOCATIONS",
    "COMPETITIONS",
    "attend_source",
    "flow_source_attention",
    "flow_source_options",
    "source_state",
]
