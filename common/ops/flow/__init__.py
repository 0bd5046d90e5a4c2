"""Flow-Attention: attention as a flow network with conserved capacities (Flowformer, ICML 2022).

Legend, for every file of this folder:
    B batch, H heads, n sinks (queries), m sources (keys), d channels of q and k, e channels of v,
    C tokens of a chunk, G = ceil(n / C) chunks.
    I, O: flows into the sinks and out of the sources; Î, Ô: the same, conserved.
    ``grad_x`` is the gradient of the loss with respect to x.

``README.md`` has the derivation.
"""

from .interface import flow_attention, flow_attention_map, flow_attention_weights
from .options import FlowOptions, flow_options
from .parts import flow_attention_of_part

__all__ = [
    "FlowOptions",
    "flow_attention",
    "flow_attention_map",
    "flow_attention_of_part",
    "flow_attention_weights",
    "flow_options",
]
