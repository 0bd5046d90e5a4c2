"""Attention modules by name: (q, k, v) -> out, the inner attention that both hosts' adapters wrap.

``build_attention("flow", causal=True, form="paper")``. A new mechanism is one module file and one line below.
"""

from typing import Dict, Type

from ..ops.checks import check_choice
from .base import InnerAttention
from .combiner import CombinerAttention
from .daft_conv import DaftConvAttention, position_entropy
from .daft_full import DaftFullAttention
from .flow import FlowAttention
from .linear import LinearAttention
from .mixed_chunk import MixedChunkAttention
from .quadratic import QuadraticAttention
from .record import AttentionRecord, KeyRecord, record_attention, record_keys
from .rotary import RotaryAttention
from .softmax import SoftmaxAttention

ATTENTIONS: Dict[str, Type[InnerAttention]] = {
    "combiner": CombinerAttention,
    "daft_conv": DaftConvAttention,
    "daft_full": DaftFullAttention,
    "flow": FlowAttention,
    "linear": LinearAttention,
    "mixed_chunk": MixedChunkAttention,
    "quadratic": QuadraticAttention,
    "softmax": SoftmaxAttention,
}


def build_attention(name: str, **options) -> InnerAttention:
    """The attention module called ``name``; ``options`` are its constructor's.

    Raises:
        ValueError: an unknown name, an option the mechanism does not have, or a value it does not allow.
    """
    check_choice("attention", name, tuple(ATTENTIONS))
    attention = ATTENTIONS[name]
    allowed = attention.option_names()
    for option in options:
        if option not in allowed:
            raise ValueError(f"attention {name!r} has no option {option!r}; allowed: {', '.join(allowed)}")
    return attention(**options)


__all__ = [
    "ATTENTIONS",
    "AttentionRecord",
    "CombinerAttention",
    "DaftConvAttention",
    "DaftFullAttention",
    "FlowAttention",
    "InnerAttention",
    "KeyRecord",
    "LinearAttention",
    "MixedChunkAttention",
    "QuadraticAttention",
    "RotaryAttention",
    "SoftmaxAttention",
    "build_attention",
    "position_entropy",
    "record_attention",
    "record_keys",
]
