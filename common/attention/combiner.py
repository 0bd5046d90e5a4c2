"""Combiner's attention with learned row summaries: the sparse baseline of FLASH's tables."""

from typing import Optional, Tuple

from torch import Tensor, nn

from ..ops.checks import State, check_padding_mask, check_positive_int, check_query_key_value
from ..ops.chunks import zero_padding
from ..ops.combiner_attention import combiner_attention, row_attention
from ..ops.history import extend_history
from ..positions import check_even, rotate, token_positions
from .base import InnerAttention, drop_sources


class CombinerAttention(InnerAttention):
    """Row-major axial Combiner (Ren et al., NeurIPS 2021): the own row, and one learned summary per earlier row.

    The key of a summary is W_2 norm(x + W_1 a), with a what ``row_attention`` gives and x the layer's input, as in the
    authors' code (``row_summary='proj'``): two matrices of the model's width more than a Transformer has.
    Self-attention only. D = H d = H e is the width: q, k and v (B, H, n, d), x (B, n, D). O(n (R + n / R) D + n D²).

    Decoding keeps every token and computes the summaries of all rows anew at each call, so a step costs
    O(n R D + n D²): it is there to be right, not to be fast.

    Raises:
        ValueError: a count below 1, or an odd ``head_dim`` with rotary positions.
    """

    state_is_constant_size = False
    needs_input = True

    def __init__(
        self, causal: bool = False, *, num_heads: int, head_dim: int, row_length: int = 128, rotary: bool = True
    ) -> None:
        super().__init__(causal)
        for name, given in (("num_heads", num_heads), ("head_dim", head_dim), ("row_length", row_length)):
            check_positive_int(name, given)
        if rotary:
            check_even("head_dim", head_dim)
        self.num_heads, self.head_dim, self.row_length, self.rotary = num_heads, head_dim, row_length, rotary
        width = num_heads * head_dim
        self.summary_proj = nn.Linear(width, width)
        self.summary_norm = nn.LayerNorm(width)
        self.summary_k_proj = nn.Linear(width, width)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
        *,
        x: Tensor,
    ) -> Tensor:
        """q, k, v (B, H, n, d), x (B, n, D) -> (B, H, n, d); see ``InnerAttention``."""
        self._check(q, k, v, x)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        check_padding_mask("query_padding_mask", query_padding_mask, q)
        x = zero_padding(x.unsqueeze(1), key_padding_mask).squeeze(1)  # it must not reach the parameters' gradients
        v = drop_sources(v, dropout_p)
        positions = token_positions(q, key_padding_mask)
        if self.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        options = {"row_length": self.row_length, "key_padding_mask": key_padding_mask}
        summary_v = row_attention(q, k, v, **options)
        summary_k = self.summary_proj(summary_v.transpose(1, 2).flatten(2))  # (B, H, n, d) -> (B, n, D)
        summary_k = self.summary_k_proj(self.summary_norm(x + summary_k))
        # (B, n, D) -> (B, H, n, d), and under autocast to the dtype of k
        summary_k = summary_k.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).to(k.dtype)
        if self.rotary:
            summary_k = rotate(summary_k, positions)
        out = combiner_attention(q, k, v, summary_k, summary_v, causal=self.causal, **options)
        return zero_padding(out, query_padding_mask)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding_mask: Optional[Tensor] = None,
        state: Optional[State] = None,
        *,
        x: Tensor,
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, d) and the state, every token so far: ``q``, ``k``, ``v``, ``x``."""
        self._check_causal()
        self._check(q, k, v, x)
        check_padding_mask("padding_mask", padding_mask, q)
        state = extend_history({"q": q, "k": k, "v": v, "x": x.unsqueeze(1).to(q.dtype)}, padding_mask, state)
        seen = state["padding_mask"]
        out = self(state["q"], state["k"], state["v"], seen, seen, x=state["x"].squeeze(1))
        return out[:, :, -q.shape[2] :], state

    def _check(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> None:
        check_query_key_value(q, k, v, one_length=True)
        if (q.shape[1], q.shape[3]) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"q has shape {tuple(q.shape)}; allowed: {self.num_heads} heads of {self.head_dim} channels"
            )
        if v.shape != q.shape:
            raise ValueError(f"v has shape {tuple(v.shape)}; allowed: that of q, {tuple(q.shape)}")
        wanted = (q.shape[0], q.shape[2], self.num_heads * self.head_dim)
        if tuple(x.shape) != wanted:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (batch, tokens, width) = {wanted}")
