"""The guide's first mechanism: a decayed mean, causal or not, without parameters."""

# common/ops/mean/reference.py
from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention import AttentionOptions, OpAttention, number, register_attention
from common.ops.shared.checks import check_padding_mask, check_query_key_value
from common.ops.shared.feature_sums import causal_sums, state_shapes
from common.ops.shared.padding import either_mask, put_back, real_first, take, zero_padding
from common.ops.shared.precision import autocast_off, compute_dtype
from common.ops.shared.reference_tools import real_tokens
from common.ops.shared.state import State, check_continuation, state_of_sums


def mean_attention_reference(
    v: Tensor,
    *,
    decay: float,
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
            if i not in keys or i not in queries:
                rows.append(torch.zeros_like(v[b, :, i]))
                continue
            weights = {j: decay ** abs(keys.index(i) - place) for place, j in enumerate(keys) if not causal or j <= i}
            rows.append(sum(weights[j] * v[b, :, j] for j in weights) / sum(weights.values()))
    return torch.stack(rows).unflatten(0, (v.shape[0], v.shape[2])).transpose(1, 2)  # (B, H, n, e)


# common/ops/mean/interface.py
def mean_attention(
    v: Tensor,
    *,
    decay: float,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Σ_j decay^|i-j| v_j / Σ_j decay^|i-j| over all j, or j <= i when causal; i and j count real tokens.

    v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; a token that is padding by either
    gives 0. Cost: O(n e) time and memory. ``initial_state`` and ``return_state`` (causal) continue a sequence: state
    ``sum_k`` (B, H, 1) and ``sum_kv`` (B, H, 1, e), float32.

    Raises:
        ValueError: a shape, mask or state that does not fit, or a state without ``causal``.
    """
    check_query_key_value(v, v, v, one_length=True, names=("v", "v", "v"))
    check_padding_mask("key_padding_mask", key_padding_mask, v)
    check_padding_mask("query_padding_mask", query_padding_mask, v)
    check_continuation(causal, initial_state, return_state)
    state = state_of_sums(initial_state, state_shapes(1, v), compute_dtype(v), v)
    with autocast_off(v):
        values = zero_padding(v.to(compute_dtype(v)), key_padding_mask)
        if causal:
            sums, weights, state = _decayed_sums(values, decay, key_padding_mask, state)
        else:
            order = real_first(key_padding_mask)  # a token's distance to another is that among real tokens
            values, padding = take(values, order), _padding_last(key_padding_mask)
            before, after = _both_sides(values, decay, padding)
            sums, weights = (put_back(x, order) for x in (before[0] + after[0], before[1] + after[1]))
        out = sums / weights.clamp(min=1e-6)  # it is at least 1 for every real token
    out = zero_padding(out, either_mask(key_padding_mask, query_padding_mask)).to(v.dtype)
    return (out, state) if return_state else out


def _decayed_sums(
    v: Tensor, decay: float, padding_mask: Tensor | None, state: State | None
) -> tuple[Tensor, Tensor, State]:
    """Sums over j <= i of decayed values (B, H, n, e) and of their weights (B, H, n, 1), and the state after them."""
    ones = zero_padding(torch.ones_like(v[..., :1]), padding_mask)
    log_decay = torch.full_like(ones, decay).log() * ones  # padding lets nothing decay
    return causal_sums(torch.ones_like(ones), ones, v, 64, state, log_decay.squeeze(-1))


def _both_sides(v: Tensor, decay: float, padding_mask: Tensor | None) -> tuple[tuple[Tensor, Tensor], ...]:
    """The same over j <= i, and over j > i; padding comes last."""
    before = _decayed_sums(v, decay, padding_mask, None)[:2]
    mask = None if padding_mask is None else padding_mask.flip([1])
    after = [x.flip([2]) for x in _decayed_sums(v.flip([2]), decay, mask, None)[:2]]
    own = zero_padding(torch.ones_like(v[..., :1]), padding_mask)
    return before, (after[0] - v, after[1] - own)


def _padding_last(padding_mask: Tensor | None) -> Tensor | None:
    """``padding_mask`` (B, n) after ``real_first``."""
    return None if padding_mask is None else padding_mask.sort(dim=1, stable=True).values


# common/attention/mean.py
@dataclass(frozen=True)
class MeanOptions(AttentionOptions):
    """Options of the decayed mean; see ``mean_attention``."""

    decay: float = number(0.9, "weight of a token, relative to its neighbour that is one nearer", most=1.0)


@register_attention("mean")
class MeanAttention(OpAttention):
    """Decayed mean of v; no parameters, O(n e)."""

    Options = MeanOptions
    takes = ("v",)
    op = staticmethod(mean_attention)
    reference_op = staticmethod(mean_attention_reference)

    def projections(self, head_dim: int) -> dict[str, int]:
        """Values alone: no host projects tokens to queries and keys."""
        return {"v": head_dim}
