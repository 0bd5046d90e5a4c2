"""Synthesizer's attention as a module."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.shared.checks import check_padding_mask, check_query_key_value
from ..ops.shared.state import State
from ..ops.synthesizer import synthesizer_attention
from ..ops.synthesizer.interface import synthesizer_attention_scriptable
from ..ops.synthesizer.reference import synthesizer_attention_reference
from ._base import InnerAttention, drop_sources
from ._options import AttentionOptions, choice, count
from ._registry import register_attention

FORMS = ("dense", "random", "factorized_random")


@dataclass(frozen=True)
class SynthesizerOptions(AttentionOptions):
    """Options of the Synthesizer; see ``common.ops.synthesizer_attention``."""

    form: str = choice(
        "dense", FORMS, "weights from each token by two layers, or free of each pair of positions, whole or factorised"
    )
    rank: int = count(32, "width of the two factors with form factorized_random; the Long Range Arena has 32")


@register_attention("synthesizer")
class SynthesizerAttention(InnerAttention):
    """Synthesizer (Tay et al., ICML 2021) for at most M = ``max_tokens`` tokens; O(n² d) time, no dot products.

    Logits over positions are W_2 relu(W_1 x) + b of the token with ``form`` "dense": W_1 is the host's projection to q,
    ``columns`` (H, M, d) is W_2, ``bias`` (H, M) is b. "random": a free matrix, ``table`` (H, M, M); q is None.
    "factorized_random": ``rows`` ``columns``ᵀ, (H, M, rank) each. k is None. Self-attention. Shapes and masks as in
    ``InnerAttention``; the state is every value so far.

    Raises:
        ValueError: an option that is not allowed; an input of more than ``max_tokens`` tokens; a q or k without use.
    """

    Options = SynthesizerOptions
    supports = frozenset({"causal", "bidirectional", "images"})
    needs = frozenset({"num_heads", "head_dim", "max_tokens"})
    state_is_constant_size = False
    causal: Final[bool]

    def setup(self) -> None:
        heads, channels, most, form = *self.shape[1:4], self.options.form
        self.max_tokens = most  # where a host looks for it

        def empty(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape)) if wanted else None

        width = channels if form == "dense" else self.options.rank
        self.table = empty(form == "random", heads, most, most)
        self.rows = empty(form == "factorized_random", heads, most, width)
        self.columns = empty(form != "random", heads, most, width)
        self.bias = empty(form == "dense", heads, most)
        self.reset_parameters()

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head: no keys, and no queries where weights are of positions alone."""
        return {"q": head_dim, "v": head_dim} if self.options.form == "dense" else {"v": head_dim}

    def reset_parameters(self) -> None:
        """All parameters as they are at first; the paper does not say.

        Random logits from N(0, 1), so that heads differ and no row is nearly one token. Those of a token as a linear
        layer has them.
        """
        if self.table is not None:
            nn.init.normal_(self.table)
        elif self.rows is not None:
            for factor in (self.rows, self.columns):
                nn.init.normal_(factor, std=self.options.rank**-0.25)
        else:
            nn.init.normal_(self.columns, std=self.columns.shape[2] ** -0.5)
            nn.init.zeros_(self.bias)

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q (B, H, n, d) or None, v (B, H, n, e) -> (B, H, n, e); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if self.causal:
                raise ValueError("causal is True; allowed in TorchScript: causal=False")
            masks = key_padding_mask, query_padding_mask
            return synthesizer_attention_scriptable(self._features(q), v, self.columns, self.bias, masks[0], masks[1])
        return self._attend(q, k, v, key_padding_mask, query_padding_mask)

    @torch.jit.unused
    def _attend(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
    ) -> Tensor:
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return synthesizer_attention(*self._given(q, k, v), causal=self.causal, **masks)

    @torch.jit.unused
    def extend(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the values and padding of all tokens so far."""
        self._check_causal()
        given = self._given(q, k, v)
        check_padding_mask("padding_mask", padding_mask, v)
        masks = {"key_padding_mask": padding_mask, "query_padding_mask": padding_mask}
        return synthesizer_attention(*given, causal=True, **masks, initial_state=state, return_state=True)

    @torch.jit.unused
    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The literal formula, slowly; shapes and masks as in ``forward``."""
        if q is not None:
            features = torch.where(q > 0, q, 0)
        else:
            features = self.table if self.options.form == "random" else self.rows
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return synthesizer_attention_reference(features, v, self.columns, self.bias, causal=self.causal, **masks)

    @torch.jit.unused
    def _given(self, q: Tensor | None, k: Tensor | None, v: Tensor) -> tuple[Any, ...]:
        """The first arguments of the function, from checked inputs."""
        for name, x in (("q", q), ("k", k)):
            if (x is not None) != (name == "q" and self.options.form == "dense"):
                given, allowed = ("None", "a tensor") if x is None else ("a tensor", "None")
                raise ValueError(f"{name} is {given}; allowed with form={self.options.form!r}: {allowed}")
        if q is not None:
            check_query_key_value(q, q, v, one_length=True, names=("q", "q", "v"))
        return self._features(q), v, self.columns, self.bias

    def _features(self, q: Tensor | None) -> Tensor:
        """What logits are made of: relu(q) of tokens (B, H, n, d), or parameters of positions (H, M, c)."""
        if q is not None:
            return F.relu(q)
        if self.rows is not None:
            return self.rows
        assert self.table is not None  # for TorchScript
        return self.table
