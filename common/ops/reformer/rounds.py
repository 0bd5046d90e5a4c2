"""Rounds of hashing: tokens sorted by bucket attend in chunks of the sorted order; then rounds are combined.

Every round of a head is treated as a head here: H R is the dimension of both, with R the inner one.
"""

import torch
from torch import Tensor

from ..shared.window_softmax import split_blocks, with_neighbours
from .hashes import finds


def attend_rounds(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, place: Tensor, codes: Tensor, chunk_size: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """In each round, attention to the keys that this round is the first to find.

    q and unit keys k (B, H, n, d), v (B, H, n, e), ``order``, ``place`` and ``codes`` (B, H, R, n) -> outputs
    (B, H, R, n, e), and logarithms of the sums of their weights (B, H, R, n), about -1e30 if a token finds only itself
    and -1e35 if it finds nothing. O(R n C (d + e + R)).
    """
    rounds, after = order.shape[2], 0 if causal else 1
    code = _in_order(codes.transpose(2, 3), order)  # (B, H R, n, R)
    q, k, v = _in_order(q, order), _in_order(k, order), _in_order(v, order)  # (B, H R, n, channels)
    q, code = split_blocks(q, chunk_size), split_blocks(code, chunk_size)  # (B, H R, G, C, channels)
    key_code = with_neighbours(code, 1, after)  # (B, H R, G, K, R) with K = 2C or 3C
    k, v = (with_neighbours(split_blocks(x, chunk_size), 1, after) for x in (k, v))
    visible = finds_first(code, key_code, chunk_size, causal)  # (B, H R, G, C, K)
    slot = torch.arange(k.shape[3], device=k.device)
    own = slot == slot[chunk_size : 2 * chunk_size, None]
    scores = (q @ k.transpose(-2, -1)).masked_fill(~visible, -1e35).masked_fill(visible & own, -1e30)
    out, total = weighted(scores, v)
    # (B, H R, G, C, ...) -> (B, H, R, G C, ...) -> (B, H, R, n, ...), no longer sorted.
    out, total = out.flatten(2, 3).unflatten(1, [-1, rounds]), total.flatten(2, 3).unflatten(1, [-1, rounds])
    return out.gather(3, place.unsqueeze(-1).expand(-1, -1, -1, -1, out.shape[4])), total.gather(3, place)


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of x (B, H, n, channels) in the ``order`` (B, H, R, n) of each round: (B, H R, n, channels)."""
    rounds, channels = order.shape[2], x.shape[3]
    x = x.unsqueeze(2).expand(-1, -1, rounds, -1, -1)
    return x.gather(3, order.unsqueeze(-1).expand(-1, -1, -1, -1, channels)).flatten(1, 2)


def finds_first(code: Tensor, key_code: Tensor, chunk_size: int, causal: bool) -> Tensor:
    """Whether a round is the first to find a key: (B, H R, N, c, m).

    ``code`` (B, H R, N, c, R) is of tokens in all rounds, ``key_code`` (B, H R, N, m, R) of the keys near them.
    """
    rounds = code.shape[4]
    code, key_code = code.unflatten(1, [-1, rounds]), key_code.unflatten(1, [-1, rounds])  # (B, H, R, N, ..., R)
    first: list[Tensor] = []
    before = torch.zeros([1, 1, rounds, 1, 1, 1], dtype=torch.bool, device=code.device)  # found before round r
    for r in range(rounds):
        matches = finds(
            code[:, :, r:, ..., r].unsqueeze(-1), key_code[:, :, r:, ..., r].unsqueeze(-2), chunk_size, causal
        )
        first.append(matches[:, :, 0] & ~before[:, :, 0])
        before = before[:, :, 1:] | matches[:, :, 1:]
    return torch.stack(first, dim=2).flatten(1, 2)


def weighted(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores) values (..., c, e), and the logarithm of the sum of weights (..., c); scores (..., c, m)."""
    largest = scores.detach().amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ values / total, (total.log() + largest).squeeze(-1)


def together(outs: Tensor, totals: Tensor) -> Tensor:
    """One softmax over the keys of all rounds, from the rounds' ``weighted`` results: (B, H, n, e)."""
    return (totals.softmax(2).unsqueeze(-1) * outs).sum(2)
