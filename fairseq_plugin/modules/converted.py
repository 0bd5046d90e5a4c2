"""Which attentions of a model have another mechanism in the place of softmax attention."""

from torch import nn

from common.attention import SoftmaxAttention

from .cross_attention import InnerCrossAttention
from .multihead_attention import InnerMultiheadAttention

Converted = InnerMultiheadAttention | InnerCrossAttention


def converted_attentions(model: nn.Module) -> dict[str, Converted]:
    """The attentions of ``model`` that are no softmax attention, by their names, in the order of the layers."""
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, Converted)}
    return {name: x for name, x in attentions.items() if not isinstance(x.inner, SoftmaxAttention)}


def projections(attention: Converted) -> tuple[nn.Module, ...]:
    """The projections of ``attention`` to queries, keys and values."""
    return attention.q_proj, attention.k_proj, attention.v_proj


def mechanism_name(attention: Converted) -> str:
    """The name of its mechanism, for messages."""
    return attention.inner.name or type(attention.inner).__name__
