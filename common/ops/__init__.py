"""Attention mechanisms as pure functions of tensors: no parameters, no host words."""

from .combiner_attention import combiner_attention, row_attention
from .daft_conv import daft_conv
from .daft_full import daft_full
from .daft_select import daft_select
from .flow_attention import flow_attention, flow_attention_map, flow_attention_weights
from .gau_attention import gau_attention
from .linear_attention import linear_attention
from .mixed_chunk_attention import mixed_chunk_attention

__all__ = [
    "combiner_attention",
    "daft_conv",
    "daft_full",
    "daft_select",
    "flow_attention",
    "flow_attention_map",
    "flow_attention_weights",
    "gau_attention",
    "linear_attention",
    "mixed_chunk_attention",
    "row_attention",
]
