"""Attention by name, for two heads of four channels."""

import torch
from torch import Tensor, nn

from common.attention import InnerAttention, build_attention

#: Options that a host always passes, and small chunks and windows.
SHAPE = {"num_heads": 2, "head_dim": 4, "max_tokens": 24}
REQUIRED = {
    "combiner": {**SHAPE, "row_length": 4},
    "daft_conv": {**SHAPE, "window": 5},
    "daft_full": {**SHAPE, "bias_dim": 3},
    "mixed_chunk": {**SHAPE, "chunk_size": 4},
}


def build(name: str, causal: bool = False, dtype: torch.dtype = torch.float64, **options) -> InnerAttention:
    """Build the attention for two heads of four channels, with parameters large enough to affect the output."""
    module = build_attention(name, causal=causal, **{**REQUIRED.get(name, SHAPE), **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(dtype)


def narrow(module: InnerAttention, k: Tensor) -> Tensor:
    """Keep of k (B, H, n, d) only the channels that the module's keys have."""
    return k[..., : module.projections(k.shape[-1])["k"]]
