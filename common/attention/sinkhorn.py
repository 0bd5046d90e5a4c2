"""Sparse Sinkhorn attention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.sinkhorn import NORMALISERS, SORTS, sinkhorn_attention
from ..ops.sinkhorn.reference import sinkhorn_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, choice, count, number
from ._registry import register_attention


@dataclass(frozen=True)
class SinkhornOptions(AttentionOptions):
    """Options of sparse Sinkhorn attention; see ``common.ops.sinkhorn_attention``."""

    chunk_size: int = count(64, "tokens of a chunk; a token sees its own chunk and a sorted one")
    sort: str = choice("sinkhorn", SORTS, "weights of chunks: the paper's, or rows alone as in the Long Range Arena")
    iterations: int = count(5, "normalisations of rows and columns, for sort='sinkhorn'")
    temperature: float = number(0.75, "that scores of chunks are divided by; the Long Range Arena has 1")
    normaliser: str = choice(
        "joint", NORMALISERS, "one softmax over both chunks, or one over each as in the Long Range Arena"
    )


@register_attention("sinkhorn")
class SinkhornAttention(OpAttention):
    """Softmax over a chunk and a soft mixture of chunks, sorted by learned weights; not causal.

    ``sort_weight`` (H, d, M) scores the chunks of the longest input by the sum of a chunk's keys, in place of the
    paper's network of two layers. Without SortCut: see ``common.ops.sinkhorn.interface``. Shapes
    and masks as in ``InnerAttention``; options as in ``common.ops.sinkhorn_attention``. Raises ValueError for a longer
    input.
    """

    about = About(
        "sparse Sinkhorn attention",
        "Tay et al., ICML 2020",
        "n C d + n² d / C",
        sizes={"C": "chunk_size"},
        url="https://arxiv.org/abs/2002.11296",
    )
    Options = SinkhornOptions
    supports = frozenset({"bidirectional"})
    needs = frozenset({"num_heads", "head_dim", "max_tokens"})
    linear_cost = False
    op = staticmethod(sinkhorn_attention)
    reference_op = staticmethod(sinkhorn_attention_reference)

    def setup(self) -> None:
        self.max_tokens = self.shape.max_tokens  # read by hosts
        chunks = -(-self.max_tokens // self.options.chunk_size)
        self.sort_weight = nn.Parameter(torch.empty(self.shape.num_heads, self.shape.head_dim, chunks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters like those of a linear layer, as in the Long Range Arena's code.

        The paper does not specify it. Sums of C standard normal keys then have scores with a standard deviation of
        √C / temperature, 10.7 by default, so sorting begins nearly hard: the largest weight of 16 chunks is 0.75 on
        average, instead of 0.22 with a standard deviation of 1.
        """
        nn.init.normal_(self.sort_weight, std=self.shape.head_dim**-0.5)

    def linear_weights(self) -> tuple[str, ...]:
        """The weight that scores chunks."""
        return ("sort_weight",)

    def op_kwargs(self) -> dict[str, Any]:
        """The sorting weight, and the maximum number of tokens."""
        return {"sort_weight": self.sort_weight, "max_tokens": self.max_tokens}
