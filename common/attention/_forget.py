"""Forget gates for any mechanism based on running sums, which make the sums forget old tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..modules.forget_gate import FORGETS, NONE, ForgetGate
from ..ops.shared.checks import ArgumentError, check_heads, check_padding_mask, check_tokens
from ..ops.shared.padding import zero_padded_tokens
from ..ops.shared.state import State
from ._base import InnerAttention
from ._options import AttentionOptions, choice
from ._wrapper import WrappingAttention


@dataclass(frozen=True)
class ForgetOptions(AttentionOptions):
    """Option of ``build_attention`` for every causal mechanism based on running sums."""

    forget: str = choice(
        NONE,
        (NONE, *FORGETS),
        "gates from the tokens, by which the running sums forget: one for each head, or one for each channel of its "
        "keys; in none of the papers of these mechanisms",
    )


class ForgetAttention(WrappingAttention):
    """Gives ``inner`` a gate per token, log_decay = log sigmoid(W x + b), which makes its running sums forget.

    A sum over all tokens so far cannot tell recent tokens from old ones. Here it is multiplied by the gate
    exp(log_decay_t) before token t is added. This is our addition and in none of the papers of these mechanisms;
    RFA-Gate, Mamba-2 and gated linear attention forget in the same way. ``forget`` is "head", one gate for each head,
    or "channel", one for each feature of its keys. x (B, n, D), the tokens before their projection, is a further input,
    with D = ``num_heads`` x ``head_dim``. Otherwise shapes, masks and state are those of ``inner``. Padding tokens do
    not make the sums forget. The gates cost O(n D H) in addition, and gates by channel make the sums slower.

    Raises:
        ValueError: ``inner`` is not causal or has no running sums; ``forget``, ``num_heads`` or ``head_dim`` is not
            allowed.
    """

    def __init__(self, inner: InnerAttention, forget: str, num_heads: int, head_dim: int) -> None:
        if "forget" not in inner.supports:
            raise ArgumentError(f"`forget` is {forget!r}; allowed for attention {inner.name!r}: {NONE!r}")
        if not inner.causal:
            raise ArgumentError(f"`forget` is {forget!r}; allowed with causal=False: {NONE!r}")
        super().__init__(inner, without=frozenset({"forget"}))
        self.needs = inner.needs | {"x"}
        self.gate = ForgetGate(forget, num_heads * head_dim, num_heads, inner.key_features(head_dim))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *,
        x: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """q, k (B, H, n, d), v (B, H, n, e), x (B, n, D) -> (B, H, n, e); see ``InnerAttention``."""
        log_decay = self.gate(self._real(x, q, key_padding_mask, "key_padding_mask"))
        return self.inner(q, k, v, key_padding_mask, query_padding_mask, dropout_p, log_decay=log_decay, **inputs)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        *,
        x: Tensor | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them."""
        log_decay = self.gate(self._real(x, q, padding_mask, "padding_mask"))
        return self.inner.extend(q, k, v, padding_mask, state, log_decay=log_decay, **inputs)

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        *,
        x: Tensor,
        **inputs: Any,
    ) -> Tensor:
        """The inner attention's literal formula with literal gates; shapes and masks as in ``forward``."""
        log_decay = self.gate.reference(x)
        return self.inner.reference(q, k, v, key_padding_mask, query_padding_mask, log_decay=log_decay, **inputs)

    def _real(self, x: Tensor | None, q: Tensor, padding_mask: Tensor | None, mask_name: str) -> Tensor:
        """Check x, and zero it at padding, which must not reach the gradients of the gates."""
        check_heads("q", q)
        check_padding_mask(mask_name, padding_mask, q)
        check_tokens(x, q, self.gate.width)
        return zero_padded_tokens(x, padding_mask)

    def extra_repr(self) -> str:
        """The option; the inner attention is printed below."""
        return f"forget={self.gate.forget!r}"
