"""Every attention by name, with what some of them need beside q, k and v."""

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


def needed(module: InnerAttention, v: Tensor) -> dict:
    """v (B, H, n, e) as the tokens x (B, n, D) before a projection, if the module wants them."""
    return module.inputs(x=v.transpose(1, 2).flatten(2))


def narrow(module: InnerAttention, k: Tensor) -> Tensor | None:
    """k (B, H, n, d) with the channels that keys of the module have; None where it has none."""
    channels = module.projections(k.shape[-1]).get("k")
    return None if channels is None else k[..., :channels]


def attend(module: InnerAttention, q: Tensor, k: Tensor, v: Tensor, **masks) -> Tensor:
    """``module(q, k, v)``."""
    return module(q, narrow(module, k), v, **masks, **needed(module, v))


def extend(module: InnerAttention, q: Tensor, k: Tensor, v: Tensor, **options):
    """``module.extend(q, k, v)``."""
    return module.extend(q, narrow(module, k), v, **options, **needed(module, v))
