"""Synthesizer: attention whose weights depend only on the query token, or only on positions.

Tay, Bahri, Metzler, Juan, Zhao, Zheng, *Synthesizer: Rethinking Self-Attention for Transformer Models*, ICML 2021,
section 3. Its factorised dense form, whose logits are products of two shorter rows, and its mixtures of forms are not
implemented.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import check_masks, check_query_key_value, shape_of
from ..shared.kv_cache import extend_kv_cache
from ..shared.packed import takes_segments
from ..shared.padding import real_first, real_positions, take, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.score_kernels import masked_softmax
from ..shared.state import State, check_continuation, state_entry
from ..shared.token_counts import check_real_tokens


@takes_segments("features", "v", shared="features")
def synthesizer_attention(
    features: Tensor,
    v: Tensor,
    columns: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Σ_j softmax_j(f_i·c_j + b_j) v_j over all j, or j <= i when causal; i and j count real tokens, at most M.

    f is relu(``features``) of each token, (B, H, n, c), in the dense Synthesizer, or ``features`` of each position,
    (H, M, c), in the factorised random one. c_j is ``columns`` (H, M, c) and b is ``bias`` (H, M), of each position.
    Without ``columns`` (the random Synthesizer), ``features`` are the logits over M positions. v (B, H, n, e)
    -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; a padded query gives 0, and so does a query that
    sees no key. Cost: O(n² (c + e)) time and O(n²) memory, never linear. ``initial_state`` and ``return_state``
    (causal) continue a sequence; the state holds all values so far, ``v`` (B, H, m, e), and ``padding_mask`` (B, m),
    and a token costs O(m (c + e)).

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask or state that does not fit, more than M real tokens, or a state without ``causal``.
    """
    check_query_key_value(v, v, v, one_length=True, names=("v", "v", "v"))
    check_masks(key_padding_mask, v, query_padding_mask, v)
    check_continuation(causal, initial_state, return_state)
    most = _check_features(features, v, columns, bias)
    before = None if initial_state is None else (~state_entry(initial_state, "padding_mask", 2, v)).sum(1)
    check_real_tokens(v, key_padding_mask, before, most)
    state, values, padding = None, v, key_padding_mask
    if initial_state is not None or return_state:
        state = extend_kv_cache({"v": v}, key_padding_mask, initial_state)
        values, padding = state["v"], state["padding_mask"]
    with autocast_off(v):
        dtype, n = compute_dtype(v), v.shape[2]
        values, hidden = zero_padding(values.to(dtype), padding), _hidden(values, causal, n, most, padding)
        if features.dim() == 4:
            rows = zero_padding(F.relu(features), query_padding_mask)
        else:
            rows = _of_positions(features, n, padding)
        if padding is not None:
            values = take(values, real_first(padding))[:, :, :most]  # tokens after the first M are padding
        logits = _logits(rows.to(dtype), columns, bias, values.shape[2])
        out = zero_padding(masked_softmax(logits, hidden) @ values, query_padding_mask).to(v.dtype)
    return (out, state) if return_state else out


def _of_positions(features: Tensor, n: int, padding_mask: Tensor | None) -> Tensor:
    """Features of the positions of the last n tokens: (H, M, c) -> (1 or B, H, n, c)."""
    if padding_mask is None:
        return _first(features, 1, n).unsqueeze(0)
    positions = real_positions(padding_mask)[:, -n:].clamp(max=features.shape[1] - 1)  # padding after M tokens
    return features[:, positions].transpose(0, 1)


def _logits(rows: Tensor, columns: Tensor | None, bias: Tensor | None, count: int) -> Tensor:
    """Logits of rows (1 or B, H, n, c) over the first ``count`` positions: (1 or B, H, n, count)."""
    if columns is None:
        logits = _first(rows, 3, count)
    else:
        logits = rows @ _first(columns, 1, count).to(rows.dtype).transpose(1, 2)
    return logits if bias is None else logits + _first(bias, 1, count).to(rows.dtype).unsqueeze(1)


def _first(x: Tensor, dim: int, count: int) -> Tensor:
    """The first ``count`` entries of a dimension."""
    # For dynamic lengths, torch.export guards on whether a slice is the whole tensor, but not for a copy.
    copied = torch.compiler.is_compiling()
    return x.index_select(dim, torch.arange(count, device=x.device)) if copied else x.narrow(dim, 0, count)


def _hidden(v: Tensor, causal: bool, n: int, most: int, padding_mask: Tensor | None) -> Tensor | None:
    """True for positions that the last n tokens do not see, (B or 1, 1, n or 1, positions); None if they see all.

    A token sees as many positions as there are real keys, or, when causal, real keys up to itself.
    """
    if padding_mask is None:
        return torch.ones(n, n, dtype=torch.bool, device=v.device).triu(1)[None, None] if causal else None
    seen = (~padding_mask).cumsum(1)  # (B, m)
    seen = seen[:, -n:] if causal else seen[:, -1:]
    positions = torch.arange(min(v.shape[2], most), device=v.device)
    return (positions >= seen.unsqueeze(2)).unsqueeze(1)


def _check_features(features: Tensor, v: Tensor, columns: Tensor | None, bias: Tensor | None) -> int:
    """Return M, the maximum number of tokens; ValueError unless the arguments fit v (B, H, n, e)."""
    fits = isinstance(features, Tensor) and features.dim() in (3, 4)
    fits = fits and features.shape[:-1] in (v.shape[:3], (v.shape[1], features.shape[1]))
    if not fits:
        raise ValueError(
            f"features is {shape_of(features)}; allowed for v of {tuple(v.shape)}: (B, H, n, c) of tokens or (H, M, c) "
            "of positions"
        )
    heads, channels = v.shape[1], features.shape[-1]
    if columns is not None and (columns.dim() != 3 or columns.shape != (heads, columns.shape[1], channels)):
        raise ValueError(f"columns is {tuple(columns.shape)}; allowed: (H, M, c) with H = {heads} and c = {channels}")
    most = channels if columns is None else columns.shape[1]
    if bias is not None and bias.shape != (heads, most):
        raise ValueError(f"bias is {tuple(bias.shape)}; allowed: (H, M) = {(heads, most)}")
    if features.dim() == 3 and features.shape[1] != most:
        raise ValueError(f"features is {tuple(features.shape)}; allowed: of {most} positions, those of the logits")
    return most
