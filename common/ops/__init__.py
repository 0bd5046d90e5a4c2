"""Attention mechanisms as pure functions of tensors: no parameters, no host words."""

from .flow_attention import flow_attention, flow_attention_map, flow_attention_weights
from .linear_attention import linear_attention

__all__ = ["flow_attention", "flow_attention_map", "flow_attention_weights", "linear_attention"]
