"""The guide's first mechanism: a weighted mean, causal or not, without parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention import About, AttentionOptions, OpAttention, number, register_attention
from common.ops.shared.checks import check_key_value, check_padding_mask
from common.ops.shared.chunks import CHUNK_SIZE
from common.ops.shared.feature_sums import causal_sums, full_sums, state_shapes
from common.ops.shared.padding import zero_padding
from common.ops.shared.precision import autocast_off, compute_dtype
from common.ops.shared.reference_tools import real_tokens
from common.ops.shared.state import State, check_continuation, state_of_sums


def mean_attention_reference(
    k: Tensor,
    v: Tensor,
    *,
    temperature: float,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
) -> Tensor:
    """The formula of ``mean_attention``, one token at a time; O(n² e), for comparison only."""
    rows = []
    for b in range(v.shape[0]):
        keys = real_tokens(key_padding_mask, b, v.shape[2])
        queries = real_tokens(query_padding_mask, b, v.shape[2])
        for i in range(v.shape[2]):
            seen = [j for j in keys if not causal or j <= i]
            weights = {j: 1 / (1 + torch.exp(-k[b, :, j].sum(-1, keepdim=True) / temperature)) for j in seen}  # (H, 1)
            total = sum(weights.values()) + 1e-6
            mean = sum((weights[j] * v[b, :, j] for j in seen), torch.zeros_like(v[b, :, i])) / total
            rows.append(mean if i in queries else torch.zeros_like(mean))
    return torch.stack(rows).unflatten(0, (v.shape[0], v.shape[2])).transpose(1, 2)  # (B, H, n, e)


def mean_attention(
    k: Tensor,
    v: Tensor,
    *,
    temperature: float,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Σ_j w_j v_j / (Σ_j w_j + 1e-6) with w_j = sigmoid(Σ_c k_jc / temperature), over all j, or j <= i when causal.

    k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; a padded query
    gives 0, a padded key is in no sum. Cost: O(n (d + e)) time and memory. ``initial_state`` and ``return_state``
    (causal) continue a sequence: state ``sum_k`` (B, H, 1) and ``sum_kv`` (B, H, 1, e), float32.

    Raises:
        ValueError: a shape, mask or state that does not fit, or a state without ``causal``.
    """
    check_key_value(k, v)
    check_padding_mask("key_padding_mask", key_padding_mask, v)
    check_padding_mask("query_padding_mask", query_padding_mask, v)
    check_continuation(causal, initial_state, return_state)
    dtype = compute_dtype(v)
    state = state_of_sums(initial_state, state_shapes(1, v), dtype, v)
    with autocast_off(v):
        scores = zero_padding(k.to(dtype), key_padding_mask).sum(-1, keepdim=True) / temperature
        weights = zero_padding(torch.sigmoid(scores), key_padding_mask)  # (B, H, n, 1)
        values, queries = zero_padding(v.to(dtype), key_padding_mask), torch.ones_like(weights)
        if causal:
            sums, totals, state = causal_sums(queries, weights, values, CHUNK_SIZE, state)
        else:
            sums, totals = full_sums(queries, weights, values)
        out = zero_padding(sums / (totals + 1e-6), query_padding_mask).to(v.dtype)
    return (out, state) if return_state else out


@dataclass(frozen=True)
class MeanOptions(AttentionOptions):
    """Options of the weighted mean; see ``mean_attention``."""

    temperature: float = number(1.0, "what keys are divided by: the higher, the more equal the weights")


@register_attention("mean")
class MeanAttention(OpAttention):
    """Mean of the values, weighed by their keys; no parameters."""

    about = About("weighted mean", "CONTRIBUTING.md", cost="n d", state="d + 1")
    Options = MeanOptions
    op_inputs = ("k", "v")
    op = staticmethod(mean_attention)
    reference_op = staticmethod(mean_attention_reference)

    def projections(self, head_dim: int) -> dict[str, int]:
        """Keys and values: no host projects tokens to queries."""
        return {"k": head_dim, "v": head_dim}
