"""Layers other than the attention mechanisms: norms, positions, biases and the gated attention unit."""

from .gated_attention_unit import GatedAttentionUnit
from .norms import NORMS, ScaleNorm, build_norm
from .relative_bias import RELATIVE_BIASES, RotaryBias, ToeplitzBias, relative_bias
from .sinusoids import ScaledSin

__all__ = [
    "NORMS",
    "RELATIVE_BIASES",
    "GatedAttentionUnit",
    "RotaryBias",
    "ScaleNorm",
    "ScaledSin",
    "ToeplitzBias",
    "build_norm",
    "relative_bias",
]
