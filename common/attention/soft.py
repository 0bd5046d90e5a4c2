"""Softmax-free attention to images, SOFT, as a module."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ops.soft import MOST_ITERATIONS, soft_attention
from ..ops.soft.reference import soft_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, count, default_of, number
from ._registry import register_attention


@dataclass(frozen=True)
class SoftOptions(AttentionOptions):
    """Options of SOFT; see ``common.ops.soft_attention``."""

    ratio: int = count(
        2, "rows and columns of tokens that make a landmark; the authors have 8, 4 and 2 by stage", setup_only=True
    )
    conv_kernel: int | None = count(
        3,
        "rows and columns under the convolution of v that is added, an odd number; 0 for none",
        optional=True,
        odd=True,
        setup_only=True,
    )
    iterations: int = count(
        default_of(soft_attention, "iterations"),
        "steps towards the inverse of the landmarks' kernel; the authors have 20",
        most=MOST_ITERATIONS,
    )
    ridge: float = number(
        default_of(soft_attention, "ridge"),
        "added to the diagonal of what is inverted; the authors' code has 0.01, the paper none",
    )


@register_attention("soft")
class SoftAttention(OpAttention):
    """A Gaussian kernel of queries, through landmarks on the grid of an image.

    Images only: q, v (B, H, n, d), and k is None, since the queries are also the keys. ``landmark_conv`` and
    ``landmark_norm``, which all heads share, make landmarks, and ``conv`` is the convolution of v, or None. Masks as in
    ``InnerAttention``; options as in ``common.ops.soft_attention``. The cost is linear if the number of landmarks is
    constant: the authors use 49, by a different ``ratio`` in each stage. For a ratio of 1 their code omits the inverse;
    here the same formula is used. Gradients are those of the iteration; the authors' code uses those of an exact
    inverse.
    """

    about = About(
        "SOFT",
        "Lu et al., NeurIPS 2021",
        "n² d / r² + n³ / r⁶",
        sizes={"r": "ratio"},
        map="the weights, with the convolution of the values that is added; entries may be negative",
        url="https://arxiv.org/abs/2110.11945",
    )
    Options = SoftOptions
    supports = frozenset({"bidirectional"})
    needs = frozenset({"num_heads", "head_dim", "spatial_shape"})
    linear_cost = False
    op_inputs = ("q", "v")
    op = staticmethod(soft_attention)
    reference_op = staticmethod(soft_attention_reference)

    def setup(self) -> None:
        heads, channels, kernel = self.shape.num_heads, self.shape.head_dim, self.options.conv_kernel
        ratio = self.options.ratio
        self.landmark_conv = nn.Conv2d(channels, channels, ratio, stride=ratio, bias=False)
        self.landmark_norm = nn.LayerNorm(channels)
        self.conv = None if kernel is None else nn.Conv2d(heads, heads, kernel, groups=heads, bias=False)

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of queries, which are also the keys, and values."""
        return {"q": head_dim, "v": head_dim}

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        for layer in (self.landmark_conv, self.landmark_norm, self.conv):
            if layer is not None:
                layer.reset_parameters()

    def op_kwargs(self) -> dict[str, Any]:
        """Weights of the landmarks' convolution and norm, and of the convolution of v."""
        return {
            "landmark_weight": self.landmark_conv.weight,
            "norm_weight": self.landmark_norm.weight,
            "norm_bias": self.landmark_norm.bias,
            "conv_weight": None if self.conv is None else self.conv.weight,
        }
