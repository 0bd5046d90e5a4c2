"""The causal form of DAFT-conv in blocks of tokens: the products of a window, and sums before it."""

from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from .weighted_means import WeightedMean, empty_log_weight, headroom, mean_of_sums, merge, running_merge

#: Tokens of a block, between which every weight is written out.
_BLOCK = 16


class _Blocks(NamedTuple):
    """Keys and values in blocks of b tokens, blocks of the whole batch side by side for products with (h, b, b)."""

    k: Tensor  # (h, b, B, G)
    v: Tensor  # (h, b, B, G, c)


def blocked(k: Tensor, v: Tensor, r: Tensor, initial: Optional[WeightedMean]) -> Tensor:
    """Blocks of b tokens: pairs inside a block, Toeplitz products with the blocks a window reaches, sums before them.

    k (B, h, T), v (B, h, T, c), r (h, window) -> (B, h, T, c); ``initial`` (B, h, c), (B, h, 1) is of what came before
    the first token, outside of every window. O(T (window + _BLOCK) c) time, O(T (_BLOCK + c)) memory.
    """
    tokens, window = k.shape[2], r.shape[1]
    size = min(_BLOCK, tokens)
    missing = -tokens % size
    blocks = _Blocks(
        F.pad(k, (0, missing)).unflatten(2, (-1, size)).permute(1, 3, 0, 2),
        F.pad(v, (0, 0, 0, missing)).unflatten(2, (-1, size)).permute(1, 3, 0, 2, 4),
    )
    reach = -(-(window - 1) // size)  # how many blocks back a window may look
    scale = blocks.k.detach().amax(1) - headroom()  # (h, B, G)
    weight = torch.exp(blocks.k - scale[:, None]).unsqueeze(-1)  # (h, b, B, G, 1)
    terms = torch.cat([weight * blocks.v, weight], dim=-1)  # (h, b, B, G, c + 1)
    parts = [_inside(blocks, r), _before(terms, scale, reach, initial)]
    groups = terms.shape[3]
    if min(reach, groups - 1) > 0:
        parts.append(_window(terms, scale, r, min(reach, groups - 1)))
    out = parts[0]
    for part in parts[1:]:
        out = merge(part, out)
    # (h, b, B, G, c) -> (B, h, G b, c)
    return out.mean.permute(2, 0, 3, 1, 4).flatten(2, 3)[:, :, :tokens]


def _distance_weights(r: Tensor, size: int, lag: int) -> Tensor:
    """r between the tokens of a block and those ``lag`` blocks before, 0 outside of the window: (h, b, b)."""
    place = torch.arange(size, device=r.device)
    distance = lag * size + place[:, None] - place  # (b, b)
    index = r.shape[1] - 1 - distance
    inside = (distance >= 0) & (index >= 0)
    return r[:, index.clamp(0, r.shape[1] - 1)].masked_fill(~inside, 0.0)


def _inside(blocks: _Blocks, r: Tensor) -> WeightedMean:
    """Each token over its block up to itself, pair by pair: no key ahead takes part in a maximum."""
    size = blocks.k.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=r.device).triu(1)
    bias = _distance_weights(r, size, 0)[:, None, None]  # (h, 1, 1, b, b)
    logits = (blocks.k.permute(0, 2, 3, 1).unsqueeze(-2) + bias).masked_fill(later, -torch.inf)  # (h, B, G, b, b)
    mean = logits.softmax(-1) @ blocks.v.permute(0, 2, 3, 1, 4)  # (h, B, G, b, c)
    log_weight = logits.logsumexp(-1).unsqueeze(-1)  # (h, B, G, b, 1)
    return WeightedMean(mean.permute(0, 3, 1, 2, 4), log_weight.permute(0, 3, 1, 2, 4))


def _window(terms: Tensor, scale: Tensor, r: Tensor, reach: int) -> WeightedMean:
    """The ``reach`` blocks before each block, with exp(r) inside of the window and 1 outside."""
    heads, size, batch, groups, _ = terms.shape
    over = r.detach().amax(1).clamp(min=0.0)[:, None, None] - headroom()  # (h, 1, 1)
    shifted = [F.pad(scale[..., :-lag], (lag, 0), value=empty_log_weight()) for lag in range(1, reach + 1)]
    scale_seen = torch.stack(shifted).amax(0) - headroom()  # (h, B, G)
    sums = torch.zeros_like(terms)
    for lag in range(1, reach + 1):
        weights = torch.exp(_distance_weights(r, size, lag) - over)  # (h, b, b)
        part = (weights @ terms[:, :, :, :-lag].flatten(2)).unflatten(2, (batch, groups - lag, -1))
        relative = torch.exp(scale[..., :-lag] - scale_seen[..., lag:])[:, None, :, :, None]
        sums = sums + F.pad(part * relative, (0, 0, lag, 0))
    # The first block has none before it, which is a weight of 0.
    return mean_of_sums(sums[..., :-1], sums[..., -1:], (scale_seen + over)[:, None, :, :, None])


def _before(terms: Tensor, scale: Tensor, reach: int, initial: Optional[WeightedMean]) -> WeightedMean:
    """What lies before the window's blocks of each block: (h, 1, B, G, c) and (h, 1, B, G, 1)."""
    sums = terms.sum(1)  # (h, B, G, c + 1)
    blocks = mean_of_sums(sums[..., :-1], sums[..., -1:], scale[..., None])
    groups, behind = sums.shape[2], reach + 1
    first = _nothing(sums) if initial is None else WeightedMean(*(x.transpose(0, 1).unsqueeze(2) for x in initial))
    seen = WeightedMean(*(torch.cat([x, y[:, :, : max(groups - behind, 0)]], dim=2) for x, y in zip(first, blocks)))
    running = running_merge(seen, dim=2)
    # The first ``behind`` blocks see what was there at first.
    at = (torch.arange(groups, device=sums.device) - reach).clamp(min=0)
    return WeightedMean(*(x.index_select(2, at).unsqueeze(1) for x in running))


def _nothing(sums: Tensor) -> WeightedMean:
    """No token at all, beside ``sums`` (h, B, G, c + 1)."""
    mean = torch.zeros_like(sums[:, :, :1, :-1])
    return WeightedMean(mean, torch.full_like(mean[..., :1], empty_log_weight()))
