"""Combiner's attention with learned row summaries: the sparse baseline of FLASH's tables."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..modules.rotary import check_even, rotate, token_positions
from ..ops.combiner import combiner_attention, row_attention
from ..ops.combiner.decoding import extend, state_before
from ..ops.combiner.reference import combiner_attention_reference, row_attention_reference
from ..ops.shared.attention_matrix import read_attention_matrix
from ..ops.shared.checks import check_masks, check_query_key_value, check_tokens
from ..ops.shared.documents import attend_by_document
from ..ops.shared.padding import zero_padded_tokens, zero_padding
from ..ops.shared.reference_tools import by_head, cleared, rotated, side_by_side
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import About, AttentionOptions, count, flag
from ._registry import register_attention


@dataclass(frozen=True)
class CombinerOptions(AttentionOptions):
    """Options of Combiner; see ``common.ops.combiner_attention``."""

    row_length: int = count(128, "tokens in a row; the authors' language model has 128, cost is least at √T")
    rotary: bool = flag(True, "rotary positions of queries and keys", setup_only=True)


@register_attention("combiner")
class CombinerAttention(OpAttention):
    """Softmax over the tokens of the own row, and one learned summary of each row before (row-major axial).

    The key of a summary is W_2 norm(x + W_1 a), where a is the output of ``row_attention`` and x the layer's input, as
    in the authors' code (``row_summary='proj'``): two more matrices of the model's width than in a Transformer.
    Self-attention only. D = H d = H e is the width: q, k and v (B, H, n, d), x (B, n, D). O(n (R + n / R) D + n D²).

    Decoding keeps the tokens of the unfinished row, and two summaries of each token of the rows before: O(n D). A step
    costs O((R + n / R) D), and O(R (R + n / R) D + R D² + n D) if it fills a row.

    Raises:
        ValueError: an option that is not allowed, or an odd ``head_dim`` with rotary positions.
    """

    about = About(
        "Combiner",
        "Ren et al., NeurIPS 2021",
        "n (R + n / R) d",
        "2d (n + n mod R)",
        sizes={"R": "row_length"},
        map="the weights; keys of summaries, which depend on v, are those of the call",
        url="https://arxiv.org/abs/2107.05768",
    )
    Options = CombinerOptions
    supports = frozenset({"causal", "bidirectional", "rotary"})
    needs = frozenset({"num_heads", "head_dim", "x"})
    linear_cost = False
    op = staticmethod(combiner_attention)
    reference_op = staticmethod(combiner_attention_reference)

    def setup(self) -> None:
        if self.options.rotary:
            check_even("head_dim", self.shape.head_dim)
        width = self.shape.num_heads * self.shape.head_dim
        self.summary_proj = nn.Linear(width, width)
        self.summary_norm = nn.LayerNorm(width)
        self.summary_k_proj = nn.Linear(width, width)

    def apply_op(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        initial_state: State | None = None,
        return_state: bool = False,
        segment_ids: Tensor | None = None,
    ) -> Any:
        """Apply ``op`` to tokens, rotated by position, and to the summaries of their rows."""
        self._check(q, k, v, x)
        check_masks(key_padding_mask, k, query_padding_mask, q)
        if segment_ids is not None:
            masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
            tokens = {"q": q, "k": k, "v": v, "x": x}
            call = partial(self._document, return_state)
            return attend_by_document(call, tokens, segment_ids, masks, self.causal, initial_state, return_state)
        if not return_state:
            return self._whole(q, k, v, x, key_padding_mask, query_padding_mask)
        return self._extend({"q": q, "k": k, "v": v, "x": x.unsqueeze(1).to(q.dtype)}, key_padding_mask, initial_state)

    def _extend(self, tokens: State, padding_mask: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """Outputs (B, H, n, e) of the next tokens after ``state``, and the new state."""
        row_length, q, k = self.options.row_length, tokens["q"], tokens["k"]
        state = state_before(tokens, row_length, state)
        if self.options.rotary:
            positions = token_positions(q, padding_mask, state["count"])
            tokens = {**tokens, "q": rotate(q, positions), "k": rotate(k, positions)}

        def summarise(rows: State, positions: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
            return self._summaries(rows["q"], rows["k"], rows["v"], rows["x"].squeeze(1), positions, padding_mask)

        out, state = extend(tokens, padding_mask, row_length, summarise, state)
        return zero_padding(out, padding_mask).to(q.dtype), state

    def _document(self, return_state: bool, masks: dict[str, Any], state: State | None, **tokens: Tensor) -> Any:
        """Apply ``apply_op`` to rows that hold one document each."""
        return self.apply_op(**tokens, **masks, initial_state=state, return_state=return_state)

    def _whole(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
        weighed: Tensor | None = None,
    ) -> Tensor:
        """The output (B, H, n, e) of a whole sequence.

        With ``weighed`` (B, H, n, e), these values replace v, but v still makes the weights.
        """
        x = zero_padded_tokens(x, key_padding_mask)  # padding must not reach the parameters' gradients
        positions = token_positions(q, key_padding_mask)
        if self.options.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        summary_k, summary_v = self._summaries(q, k, v, x, positions, key_padding_mask)
        if weighed is not None:
            row_length = self.options.row_length
            summary_v = row_attention(q, k, weighed, row_length=row_length, key_padding_mask=key_padding_mask)
            v = weighed
        out = super().apply_op(q, k, v, summary_k, summary_v, key_padding_mask=key_padding_mask)
        return zero_padding(out, query_padding_mask)

    def _summaries(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, positions: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Summary keys (B, H, n, d) and values (B, H, n, e) of tokens that start at a row.

        q and k are rotated already, x (B, n, D) is 0 at padding.
        """
        summary_v = row_attention(q, k, v, row_length=self.options.row_length, key_padding_mask=padding_mask)
        summary_k = self.summary_proj(summary_v.transpose(1, 2).flatten(2))  # (B, H, n, d) -> (B, n, D)
        summary_k = self.summary_k_proj(self.summary_norm(x + summary_k))
        # (B, n, D) -> (B, H, n, d), and under autocast to the dtype of k
        summary_k = summary_k.unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2).to(k.dtype)
        return rotate(summary_k, positions) if self.options.rotary else summary_k, summary_v

    def attention_matrix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        *,
        x: Tensor,
    ) -> Tensor:
        """As in ``OpAttention``; the summaries' keys, which depend on v, are those of the given v."""
        self._check(q, k, v, x)
        if segment_ids is not None:
            raise ValueError("segment_ids is given; allowed for the map of combiner: one document in each row")
        masks = key_padding_mask, query_padding_mask
        return read_attention_matrix(lambda weighed: self._whole(q, k, v, x, *masks, weighed), v)

    def apply_reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
    ) -> Tensor:
        """Apply ``reference_op`` to the same tensors, literally."""
        turn = (lambda y: rotated(y, key_padding_mask)) if self.options.rotary else (lambda y: y)
        q, k = turn(q), turn(k)
        options = {"row_length": self.options.row_length, "key_padding_mask": key_padding_mask}
        summary_v = row_attention_reference(q, k, v, **options)
        summary_k = self.summary_k_proj(self.summary_norm(x + self.summary_proj(side_by_side(summary_v))))
        summary_k = turn(by_head(summary_k, self.shape.num_heads))
        out = super().apply_reference(q, k, v, summary_k, summary_v, key_padding_mask=key_padding_mask)
        return cleared(out, query_padding_mask)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> None:
        check_query_key_value(q, k, v, one_length=True)
        heads, channels = self.shape.num_heads, self.shape.head_dim
        if (q.shape[1], q.shape[3]) != (heads, channels):
            raise ValueError(f"q has shape {tuple(q.shape)}; allowed: {heads} heads of {channels} channels")
        if v.shape != q.shape:
            raise ValueError(f"v has shape {tuple(v.shape)}; allowed: that of q, {tuple(q.shape)}")
        check_tokens(x, q, heads * channels)
