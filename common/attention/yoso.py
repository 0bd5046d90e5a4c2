"""YOSO-E as a module."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.shared.padding import zero_padding
from ..ops.shared.precision import compute_dtype
from ..ops.yoso import GRADIENTS, yoso_attention
from ..ops.yoso.interface import COSINE_LIMIT
from ..ops.yoso.reference import yoso_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, choice, count, default_of
from ._registry import register_attention


@dataclass(frozen=True)
class YosoOptions(AttentionOptions):
    """Options of YOSO-E; see ``common.ops.yoso_attention``."""

    tau: int = count(
        default_of(yoso_attention, "tau"),
        "hyperplanes of a hash: the larger, the faster weights fall off with the angle",
    )
    gradient: str = choice(
        default_of(yoso_attention, "gradient"), GRADIENTS, "of the weights: the paper's lower bound, or exact"
    )


@register_attention("yoso")
class YosoAttention(OpAttention):
    """The probability that random hashes of query and key are equal, as the weight; O(n) memory.

    Outputs are normalised to unit vectors per head. Decoding keeps every key and value. Shapes and masks as in
    ``InnerAttention``; options as in ``common.ops.yoso_attention``.
    """

    about = About(
        "YOSO-E",
        "Zeng et al., ICML 2021",
        "n² d",
        "2n d",
        map="the weights before outputs are made unit vectors",
        url="https://arxiv.org/abs/2111.09714",
    )
    Options = YosoOptions
    supports = frozenset({"causal", "bidirectional", "cross"})
    linear_cost = False
    permutation_equivariant = True
    op = staticmethod(yoso_attention)
    reference_op = staticmethod(yoso_attention_reference)

    def attention_matrix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights (B, H, n, m): ``forward`` is map @ v, normalised to a unit vector. O(n m d)."""
        dtype = compute_dtype(q)
        cosines = F.normalize(q.to(dtype), dim=-1) @ F.normalize(k.to(dtype), dim=-1).transpose(2, 3)
        weights = (1 - torch.arccos(cosines.clamp(-COSINE_LIMIT, COSINE_LIMIT)) / math.pi) ** self.options.tau
        if self.causal:
            weights = weights.tril()
        if key_padding_mask is not None:
            weights = weights.masked_fill(key_padding_mask[:, None, None], 0)
        return zero_padding(weights, query_padding_mask).to(v.dtype)
