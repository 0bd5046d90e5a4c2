"""Attention modules by name: (q, k, v) -> out, the inner attention that both hosts' adapters wrap.

``build_attention("flow", causal=True, form="paper")``. A mechanism is one file of this folder; files that begin with an
underscore are what the mechanisms share.
"""

from ._base import FACTS, INPUTS, SUPPORTS, AttentionShape, InnerAttention
from ._options import AttentionOptions, Option
from ._record import AttentionRecord, KeyRecord, record_attention, record_keys
from ._registry import ATTENTIONS, build_attention, import_mechanisms, options_of, register_attention
from ._rotary import RotaryAttention
from ._short_conv import ShortConvAttention
from .bigbird import BigbirdAttention
from .combiner import CombinerAttention
from .cosformer import CosformerAttention
from .daft_conv import DaftConvAttention, position_entropy
from .daft_full import DaftFullAttention
from .favor import FavorAttention
from .flow import FlowAttention
from .linear import LinearAttention
from .linformer import LinformerAttention
from .local import LocalAttention
from .longformer import LongformerAttention
from .mixed_chunk import MixedChunkAttention
from .nystrom import NystromAttention
from .quadratic import QuadraticAttention
from .rfa import RfaAttention
from .rfa_gate import RfaGateAttention
from .soft import SoftAttention
from .softmax import SoftmaxAttention
from .sparse import SparseAttention
from .synthesizer import SynthesizerAttention

import_mechanisms(__name__, __path__)

__all__ = [
    "ATTENTIONS",
    "FACTS",
    "INPUTS",
    "SUPPORTS",
    "AttentionOptions",
    "AttentionRecord",
    "AttentionShape",
    "BigbirdAttention",
    "CombinerAttention",
    "CosformerAttention",
    "DaftConvAttention",
    "DaftFullAttention",
    "FavorAttention",
    "FlowAttention",
    "InnerAttention",
    "KeyRecord",
    "LinearAttention",
    "LinformerAttention",
    "LocalAttention",
    "LongformerAttention",
    "MixedChunkAttention",
    "NystromAttention",
    "Option",
    "QuadraticAttention",
    "RfaAttention",
    "RfaGateAttention",
    "RotaryAttention",
    "ShortConvAttention",
    "SoftAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "SynthesizerAttention",
    "build_attention",
    "options_of",
    "position_entropy",
    "record_attention",
    "record_keys",
    "register_attention",
]
