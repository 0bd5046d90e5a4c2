"""Softmax-free attention to images, SOFT, as a module."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.soft import MOST_ITERATIONS, attend
from ..ops.soft.interface import soft_attention_scriptable
from ..ops.soft.reference import soft_attention_reference
from ._base import InnerAttention, drop_sources
from ._options import AttentionOptions, count, number
from ._registry import register_attention


@dataclass(frozen=True)
class SoftOptions(AttentionOptions):
    """Options of SOFT; see ``common.ops.soft_attention``."""

    ratio: int = count(2, "rows and columns of tokens that make a landmark; the authors have 8, 4 and 2 by stage")
    conv_kernel: int | None = count(
        3,
        "rows and columns under the convolution of v that is added, an odd number; 0 for none",
        optional=True,
        odd=True,
    )
    iterations: int = count(
        20, "steps towards the inverse of the landmarks' kernel; the authors have 20", most=MOST_ITERATIONS
    )
    ridge: float = number(0.01, "added to the diagonal of what is inverted; the authors' code has 0.01, the paper none")


@register_attention("soft")
class SoftAttention(InnerAttention):
    """SOFT (Lu et al., NeurIPS 2021): a Gaussian kernel of queries, through landmarks of an image, O(n² d / ratio²).

    Images alone: q, v (B, H, n, d), and k is None, since the queries are the keys. ``landmark_conv`` and
    ``landmark_norm``, which all heads share, make landmarks, and ``conv`` is the convolution of v, or None. Masks as in
    ``InnerAttention``; options as in ``common.ops.soft_attention``. Linear where the number of landmarks is kept, as
    the authors keep it at 49 with another ``ratio`` in each stage. Where that is 1 their code leaves the inverse out;
    here one formula holds. Gradients are those of the iteration; the authors' code takes those of an exact inverse.
    """

    Options = SoftOptions
    supports = frozenset({"images"})
    needs = frozenset({"num_heads", "head_dim", "spatial_shape"})
    state_is_constant_size = False

    def setup(self) -> None:
        heads, channels, kernel = self.shape.num_heads, self.shape.head_dim, self.options.conv_kernel
        self.iterations, self.ridge = self.options.iterations, float(self.options.ridge)
        ratio = self.options.ratio
        self.landmark_conv = nn.Conv2d(channels, channels, ratio, stride=ratio, bias=False)
        self.landmark_norm = nn.LayerNorm(channels)
        self.conv = None if kernel is None else nn.Conv2d(heads, heads, kernel, groups=heads, bias=False)

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head: no keys."""
        return {"q": head_dim, "v": head_dim}

    def reset_parameters(self) -> None:
        """All parameters as they are at first."""
        for layer in (self.landmark_conv, self.landmark_norm, self.conv):
            if layer is not None:
                layer.reset_parameters()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        spatial_shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """q, v (B, H, n, d) -> (B, H, n, d); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if spatial_shape is None:
                raise ValueError("spatial_shape is None; allowed: (height, width)")
            height, width = spatial_shape
            landmark, norm, norm_bias, conv = self._parameters_of_layers()
            options = self.iterations, self.ridge
            masks = key_padding_mask, query_padding_mask
            return soft_attention_scriptable(
                q, v, landmark, norm, norm_bias, conv, height, width, options[0], options[1], masks[0], masks[1]
            )
        return self._attend(q, k, v, key_padding_mask, query_padding_mask, spatial_shape)

    @torch.jit.unused
    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        spatial_shape: tuple[int, int] | None,
    ) -> Tensor:
        if k is not None:
            raise ValueError("k is a tensor; allowed: None, the queries are the keys")
        options = spatial_shape, self.iterations, self.ridge
        return attend(q, v, *self._parameters_of_layers(), *options, key_padding_mask, query_padding_mask)

    @torch.jit.unused
    def reference(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        spatial_shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """The literal formula, slowly; shapes and masks as in ``forward``."""
        *parameters, conv = self._parameters_of_layers()
        options = {"conv_weight": conv, "iterations": self.iterations, "ridge": self.ridge}
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return soft_attention_reference(q, v, *parameters, spatial_shape=spatial_shape, **options, **masks)

    def _parameters_of_layers(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Weights of the landmarks' convolution, of their norm, its bias, and of the convolution of v."""
        conv: Tensor | None = None
        if self.conv is not None:
            conv = self.conv.weight
        return self.landmark_conv.weight, self.landmark_norm.weight, self.landmark_norm.bias, conv
