"""Synthesizer's attention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.shared.checks import check_query_key_value, check_table
from ..ops.synthesizer import synthesizer_attention
from ..ops.synthesizer.reference import synthesizer_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, choice, count
from ._registry import register_attention

FORMS = ("dense", "random", "factorized_random")


@dataclass(frozen=True)
class SynthesizerOptions(AttentionOptions):
    """Options of the Synthesizer; see ``common.ops.synthesizer_attention``."""

    form: str = choice(
        "dense",
        FORMS,
        "weights from each token by two layers, or free of each pair of positions, whole or factorised",
        setup_only=True,
    )
    rank: int = count(
        32, "width of the two factors with form factorized_random; the Long Range Arena has 32", setup_only=True
    )


@register_attention("synthesizer")
class SynthesizerAttention(OpAttention):
    """Weights from each token by itself, or from positions only, without dot products of tokens.

    Logits over positions are, with ``form`` "dense", W_2 relu(W_1 x) + b of the token: W_1 is the host's projection to
    q, ``columns`` (H, M, d) is W_2, ``bias`` (H, M) is b. "random": a free matrix, ``table`` (H, M, M); q is None.
    "factorized_random": ``rows`` ``columns``ᵀ, (H, M, rank) each; q is None. k is always None. Self-attention. Shapes
    and masks as in ``InnerAttention``; the state holds all values so far.

    Raises:
        ValueError: an option that is not allowed; an input of more than ``max_tokens`` tokens; an unused q or k.
    """

    about = About(
        "Synthesizer", "Tay et al., ICML 2021, section 3", "n² d", "n d", url="https://arxiv.org/abs/2005.00743"
    )
    Options = SynthesizerOptions
    supports = frozenset({"causal", "bidirectional"})
    needs = frozenset({"num_heads", "head_dim", "max_tokens"})
    linear_cost = False
    weighted_mean = True
    op_inputs = ("q", "v")
    op = staticmethod(synthesizer_attention)
    reference_op = staticmethod(synthesizer_attention_reference)

    def setup(self) -> None:
        heads, channels, tokens, form = *self.shape[1:4], self.options.form
        self.max_tokens = tokens  # read by hosts

        def empty(wanted: bool, *shape: int) -> nn.Parameter | None:
            if not wanted:
                return None
            check_table("max_tokens", tokens, shape)
            return nn.Parameter(torch.empty(shape))

        width = channels if form == "dense" else self.options.rank
        self.table = empty(form == "random", heads, tokens, tokens)
        self.rows = empty(form == "factorized_random", heads, tokens, width)
        self.columns = empty(form != "random", heads, tokens, width)
        self.bias = empty(form == "dense", heads, tokens)
        self.reset_parameters()

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head: no keys, and no queries if weights depend on positions only."""
        return {"q": head_dim, "v": head_dim} if self.options.form == "dense" else {"v": head_dim}

    def reset_parameters(self) -> None:
        """Initialise all parameters; the paper does not specify it.

        Random logits are from N(0, 1), so that heads differ and no row is nearly one-hot. The weights of the dense form
        are scaled as in a linear layer.
        """
        if self.table is not None:
            nn.init.normal_(self.table)
        elif self.rows is not None:
            for factor in (self.rows, self.columns):
                nn.init.normal_(factor, std=self.options.rank**-0.25)
        else:
            nn.init.normal_(self.columns, std=self.columns.shape[2] ** -0.5)
            nn.init.zeros_(self.bias)

    def linear_weights(self) -> tuple[str, ...]:
        """W_2 of the dense form; the other forms multiply no token by a parameter."""
        return ("columns",) if self.options.form == "dense" else ()

    def op_kwargs(self) -> dict[str, Any]:
        """Parameters of the logits over positions; None for those that the form does not have."""
        return {"columns": self.columns, "bias": self.bias}

    def operands(self, q: Tensor | None, k: Tensor | None, v: Tensor) -> tuple[Tensor | None, ...]:
        """Features and v: the features are q, or parameters per position."""
        q, v = super().operands(q, k, v)
        if q is None:
            return (self.table if self.rows is None else self.rows), v
        check_query_key_value(q, q, v, one_length=True, names=("q", "q", "v"))  # the op calls q features
        return q, v
