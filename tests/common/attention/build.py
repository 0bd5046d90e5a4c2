"""Attention by name, for two heads of four channels."""

import torch
from torch import Tensor, nn

from common.attention import InnerAttention, build_attention

#: What a host knows, and small chunks and windows.
SHAPE = {"num_heads": 2, "head_dim": 4, "max_tokens": 24}
REQUIRED = {
    "combiner": {**SHAPE, "row_length": 4},
    "daft_conv": {**SHAPE, "window": 5},
    "daft_full": {**SHAPE, "bias_dim": 3},
    "mixed_chunk": {**SHAPE, "chunk_size": 4},
}


def build(name: str, causal: bool = False, dtype: torch.dtype = torch.float64, **options) -> InnerAttention:
    """The attention for two heads of four channels, its parameters large enough to matter."""
    module = build_attention(name, causal=causal, **{**REQUIRED.get(name, SHAPE), **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(dtype)


def narrow(module: InnerAttention, k: Tensor) -> Tensor:
    """k (B, H, n, d) with the channels alone that keys of the module have."""
    return k[..., : module.projections(k.shape[-1])["k"]]
