"""Models of lineartime for Hugging Face's transformers, without fairseq; importing this package imports transformers."""

from .configuration import GATED_ATTENTION_UNIT, LayerAttention, LineartimeConfig

__all__ = ["GATED_ATTENTION_UNIT", "LayerAttention", "LineartimeConfig"]
