"""Attention mechanisms as pure functions of tensors: no parameters, no host words. One folder is one mechanism."""

from .bigbird import bigbird_attention
from .combiner import combiner_attention, row_attention
from .cosformer import cosformer_attention
from .daft import daft_conv, daft_full, daft_select
from .favor import favor_attention
from .flow import flow_attention, flow_attention_map, flow_attention_weights
from .flow_source import flow_source_attention
from .gated_delta import gated_delta_attention
from .gla import gla_attention
from .hedgehog import hedgehog_attention
from .kimi_delta import kimi_delta_attention
from .linear import linear_attention
from .linformer import linformer_attention
from .local import local_attention
from .lolcats import lolcats_attention
from .longformer import longformer_attention
from .mixed_chunk import mixed_chunk_attention
from .nystrom import nystrom_attention
from .quadratic import gau_attention
from .reformer import reformer_attention
from .retention import retention_attention
from .rfa import rfa_attention, rfa_gate_attention
from .sinkhorn import sinkhorn_attention
from .soft import soft_attention
from .softmax import softmax_attention
from .sparse import sparse_attention
from .synthesizer import synthesizer_attention
from .t2r import t2r_attention
from .yoso import yoso_attention

__all__ = [
    "bigbird_attention",
    "combiner_attention",
    "cosformer_attention",
    "daft_conv",
    "daft_full",
    "daft_select",
    "favor_attention",
    "flow_attention",
    "flow_attention_map",
    "flow_attention_weights",
    "flow_source_attention",
    "gated_delta_attention",
    "gau_attention",
    "gla_attention",
    "hedgehog_attention",
    "kimi_delta_attention",
    "linear_attention",
    "linformer_attention",
    "local_attention",
    "lolcats_attention",
    "longformer_attention",
    "mixed_chunk_attention",
    "nystrom_attention",
    "reformer_attention",
    "retention_attention",
    "rfa_attention",
    "rfa_gate_attention",
    "row_attention",
    "sinkhorn_attention",
    "soft_attention",
    "softmax_attention",
    "sparse_attention",
    "synthesizer_attention",
    "t2r_attention",
    "yoso_attention",
]
