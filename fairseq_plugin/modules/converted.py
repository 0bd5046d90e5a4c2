"""Finds the attentions of a model in which another mechanism replaces softmax attention."""

from torch import nn

from common.attention import SoftmaxAttention

from .cross_attention import InnerCrossAttention
from .multihead_attention import InnerMultiheadAttention

Converted = InnerMultiheadAttention | InnerCrossAttention


def converted_attentions(model: nn.Module) -> dict[str, Converted]:
    """The attentions of ``model`` other than softmax attention, by name, in the order of the layers."""
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, Converted)}
    return {name: x for name, x in attentions.items() if not isinstance(x.inner, SoftmaxAttention)}


def projections(attention: Converted) -> tuple[nn.Module, ...]:
    """The projections of ``attention`` to queries, keys and values."""
    return attention.q_proj, attention.k_proj, attention.v_proj


def mechanism_name(attention: Converted) -> str:
    """The name of the mechanism of ``attention``, for messages."""
    return attention.inner.name or type(attention.inner).__name__
