"""DAFT as self-attention layers for timm's vision transformers.

Legend: B batch, N tokens, C channels, H heads, Y x X the rows and columns of an image's tokens.
"""

import math
from typing import Any, Dict, List, Optional, Tuple

import torch
from timm.layers import register_notrace_function, resample_abs_pos_embed
from torch import Tensor, nn

from common.attention import build_attention
from common.attention.daft_conv import Window

from .attention import SelfAttention, refuse_masks


class DaftSelfAttention(SelfAttention):
    """``SelfAttention`` around DAFT: ``qkv`` gives queries, keys and values side by side, then ``proj``.

    Keys of DAFT-conv are one number per head, so there ``qkv`` is 2 C + H wide (C + H without queries); otherwise it is
    timm's. Raises ValueError for ``qk_norm``, keys being exponents, and as ``SelfAttention``.
    """

    def configure(self, **options: Any) -> None:
        """Give the mechanism other than its default options, and ``qkv`` the width they need; weights are new.

        Raises:
            ValueError: an option the mechanism does not have, a value it does not allow, or a layer with ``qk_norm``.
        """
        if not isinstance(self.k_norm, nn.Identity):
            raise ValueError("qk_norm is True; allowed with DAFT: False, its keys are exponents")
        dd = {"device": self.proj.weight.device, "dtype": self.proj.weight.dtype}
        self.attention = build_attention(self.mechanism, **self._options(**options)).to(**dd)
        dim, key_channels = self.proj.in_features, self.attention.key_channels
        keys = dim if key_channels is None else self.num_heads * key_channels
        self.widths = [dim if self.attention.query else 0, keys, dim]
        if self.qkv.out_features != sum(self.widths):
            self.qkv = nn.Linear(dim, sum(self.widths), bias=self.qkv.bias is not None, **dd)

    def _options(self, **options: Any) -> Dict[str, Any]:
        """``options`` and what the mechanism's constructor needs beside them; subclasses add it."""
        return options

    def _heads(self, x: Tensor) -> Tuple[Optional[Tensor], Tensor, Tensor]:
        """x (B, N, C) -> q (B, H, N, C / H) or None, k (B, H, N, C / H or 1), v (B, H, N, C / H)."""
        q, k, v = self.qkv(x).split(self.widths, dim=-1)
        # each (B, N, H c) -> (B, H, N, c)
        query = q.unflatten(2, (self.num_heads, -1)).transpose(1, 2) if self.widths[0] > 0 else None
        k = k.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return query, k, v.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _project(self, x: Tensor) -> Tensor:
        """What attention gives (B, H, N, C / H) -> (B, N, C)."""
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).flatten(2))))


class DaftConvSelfAttention(DaftSelfAttention):
    """``DaftSelfAttention`` with DAFT-conv over the raster of an image of any size, window 11; O(N C window²).

    Takes maps (B, Y, X, C), or tokens (B, N, C) of a square image without class token or registers: a number of tokens
    that is no square is refused, but one that happens to be one, as of 2 x 8 patches, cannot be told from a square.
    """

    mechanism = "daft_conv"

    def _options(self, window: Window = 11, **options: Any) -> Dict[str, Any]:
        window = (window, window) if isinstance(window, int) else window
        return {"num_heads": self.num_heads, "window": window, **options}

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        """x (B, Y, X, C) or (B, N, C) -> the same shape.

        Raises:
            ValueError: any ``attn_mask``, ``is_causal``, or tokens that are no square.
        """
        x = refuse_masks(x, attn_mask, is_causal)
        tokens, height, width = raster(x)
        q, k, v = self._heads(tokens)
        dropout_p = self.attn_drop.p if self.training else 0.0
        out = self.attention(q, k, v, dropout_p=dropout_p, spatial_shape=(height, width))
        return self._project(out).view_as(x)


class DaftFullSelfAttention(DaftSelfAttention):
    """``DaftSelfAttention`` with DAFT-full over all tokens of an image of one size; O(N² C).

    Its option ``max_tokens``, their number, is 1 until ``configure``.
    """

    mechanism = "daft_full"

    def _options(self, max_tokens: int = 1, **options: Any) -> Dict[str, Any]:
        return {"max_tokens": max_tokens, **options}

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        """x (B, N, C) -> (B, N, C); ValueError for any ``attn_mask``, ``is_causal``, or more tokens than N."""
        x = refuse_masks(x, attn_mask, is_causal)
        q, k, v = self._heads(x)
        return self._project(self.attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0))

    @torch.jit.ignore
    def set_grid_size(self, new: Tuple[int, int], old: Tuple[int, int], num_prefix_tokens: int) -> None:
        """Resample the position bias, for good, from the grid ``old`` of tokens to ``new``, bicubically."""
        for name, parameter in list(self.attention.named_parameters()):
            resampled = resample_position_bias(name, parameter.detach(), new, old, num_prefix_tokens)
            setattr(self.attention, name, nn.Parameter(resampled, requires_grad=parameter.requires_grad))
        self.attention.max_tokens = new[0] * new[1] + num_prefix_tokens


def resample_position_bias(
    name: str, bias: Tensor, new: Tuple[int, int], old: Tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """pe0, pe1 (N, n) or w (N, N) of DAFT-full, for the tokens of another grid; ``name`` tells w from a factor."""
    positions: List[int] = [*new]

    def resample(x: Tensor) -> Tensor:
        return resample_abs_pos_embed(x[None], positions, [*old], num_prefix_tokens=num_prefix_tokens)[0]

    bias = resample(bias)
    return resample(bias.transpose(0, 1)).transpose(0, 1).contiguous() if name == "w" else bias


@torch.fx.wrap
@register_notrace_function
def raster(x: Tensor) -> Tuple[Tensor, int, int]:
    """A map (B, Y, X, C), or the tokens (B, N, C) of a square image, as tokens (B, N, C), Y and X.

    A function by itself because FX must not trace its conditions. Raises ValueError for tokens that are no square.
    """
    if x.dim() == 4:
        return x.flatten(1, 2), x.shape[1], x.shape[2]
    side = int(math.sqrt(x.shape[1]))
    if side * side != x.shape[1]:
        raise ValueError(
            f"x has {x.shape[1]} tokens; allowed for DAFT-conv in a stock vision transformer: those of a square image, "
            "with class_token=False, global_pool='avg' and without registers (daft_conv_s takes images of any size)"
        )
    return x, side, side
