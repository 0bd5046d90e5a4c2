"""The guide's second mechanism: not causal, with parameters and a longest length."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.attention import AttentionOptions, OpAttention, flag, register_attention
from common.ops.shared.checks import check_padding_mask, check_query_key_value
from common.ops.shared.padding import either_mask, real_positions, zero_padding
from common.ops.shared.precision import autocast_off, compute_dtype
from common.ops.shared.reference_tools import real_tokens
from common.ops.shared.score_kernels import masked_softmax
from common.ops.shared.token_counts import check_real_tokens


def pooled_attention_reference(
    q: Tensor,
    v: Tensor,
    position_logits: Tensor,
    gate_weight: Tensor,
    *,
    gate: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """The formula of ``pooled_attention``, one token at a time; for comparison only."""
    out = torch.zeros_like(v)
    for b in range(v.shape[0]):
        keys = real_tokens(key_padding_mask, b, v.shape[2])
        weights = position_logits[:, : len(keys)].exp()  # (H, real tokens)
        pooled = sum(weights[:, [place]] * v[b, :, j] for place, j in enumerate(keys))
        for i in set(keys) & set(real_tokens(query_padding_mask, b, v.shape[2])):
            share = 1 / (1 + torch.exp(-(q[b, :, i] * gate_weight).sum(-1, keepdim=True))) if gate else 1.0
            index = (torch.tensor(b), torch.arange(v.shape[1]), torch.tensor(i))
            out = out.index_put(index, share * pooled / weights.sum(1, keepdim=True))
    return out


def pooled_attention(
    q: Tensor,
    v: Tensor,
    position_logits: Tensor,
    gate_weight: Tensor,
    *,
    gate: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """sigmoid(q_i·u) Σ_j softmax_j(b_j) v_j, with a logit b_j of each of at most M positions; O(n (d + e)).

    ``position_logits`` b (H, M), ``gate_weight`` u (H, d); without ``gate`` the sigmoid is left out. j counts real
    tokens. q (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; a token
    that is padding by either gives 0.

    Raises:
        ValueError: a shape or mask that does not fit, or more than M real tokens.
    """
    check_query_key_value(q, q, v, one_length=True, names=("q", "q", "v"))
    check_padding_mask("key_padding_mask", key_padding_mask, v)
    check_padding_mask("query_padding_mask", query_padding_mask, v)
    check_real_tokens(v, key_padding_mask, None, position_logits.shape[1])
    hidden, dtype = either_mask(key_padding_mask, query_padding_mask), compute_dtype(v)
    with autocast_off(v):
        logits = _logits(position_logits.to(dtype), v.shape[2], key_padding_mask)  # (B or 1, H, 1, n)
        unseen = None if key_padding_mask is None else key_padding_mask[:, None, None]
        out = masked_softmax(logits, unseen) @ zero_padding(v.to(dtype), key_padding_mask)  # (B, H, 1, e)
        if gate:
            scores = (zero_padding(q.to(dtype), hidden) * gate_weight.to(dtype).unsqueeze(1)).sum(-1, keepdim=True)
            out = torch.sigmoid(scores) * out
    return zero_padding(out.expand(-1, -1, v.shape[2], -1), hidden).to(v.dtype)


def _logits(position_logits: Tensor, n: int, padding_mask: Tensor | None) -> Tensor:
    """Those of n tokens, by their place among the real ones: (H, M) -> (B or 1, H, 1, n)."""
    if padding_mask is None:
        positions = torch.arange(n, device=position_logits.device).unsqueeze(0)
    else:
        positions = real_positions(padding_mask).clamp(max=position_logits.shape[1] - 1)  # of padding, anything
    return position_logits[:, positions].transpose(0, 1).unsqueeze(2)


@dataclass(frozen=True)
class PooledOptions(AttentionOptions):
    """Options of pooled attention; see ``pooled_attention``."""

    gate: bool = flag(True, "each token takes a share of the pooled values that its query decides on")


@register_attention("pooled")
class PooledAttention(OpAttention):
    """A learned mean over at most M = ``max_tokens`` positions, gated by each query; O(n (d + e))."""

    Options = PooledOptions
    supports = frozenset({"bidirectional"})
    needs = frozenset({"num_heads", "head_dim", "max_tokens"})
    op_inputs = ("q", "v")
    op = staticmethod(pooled_attention)
    reference_op = staticmethod(pooled_attention_reference)

    def setup(self) -> None:
        heads, channels, most = self.shape.num_heads, self.shape.head_dim, self.shape.max_tokens
        self.max_tokens = most  # where a host looks for it
        self.position_logits = nn.Parameter(torch.empty(heads, most))
        self.gate_weight = nn.Parameter(torch.empty(heads, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All parameters as they are at first."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def projections(self, head_dim: int) -> dict[str, int]:
        """Queries and values."""
        return {"q": head_dim, "v": head_dim}

    def op_kwargs(self) -> dict[str, Any]:
        """The parameters."""
        return {"position_logits": self.position_logits, "gate_weight": self.gate_weight}
