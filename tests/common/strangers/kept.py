"""A mechanism from elsewhere that keeps every promise: causal linear attention under another name."""

from dataclasses import dataclass

from common.attention import AttentionOptions, register_attention
from common.attention._base import OpAttention
from common.attention._options import choice, count
from common.ops import linear_attention
from common.ops.linear.reference import linear_attention_reference


@dataclass(frozen=True)
class StrangerOptions(AttentionOptions):
    """Options of the stranger; see ``common.ops.linear.linear_attention``."""

    phi: str = choice("elu+1", ("elu+1", "sigmoid"), "feature map of queries and keys")
    chunk_size: int = count(64, "tokens that are computed at once", speed_only=True)


@register_attention("stranger")
class StrangerAttention(OpAttention):
    """Causal linear attention."""

    Options = StrangerOptions
    supports = frozenset({"causal"})
    op = staticmethod(linear_attention)
    reference_op = staticmethod(linear_attention_reference)
