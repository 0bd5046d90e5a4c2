"""Softmax attention to the keys near each query, and to further keys, under one normaliser.

Legend: B batch, H heads, n tokens, d channels of q and k, e channels of v, S tokens of a block, G blocks, K keys with
which a block of queries is compared, m further keys. Arguments are not checked: q is already divided by √d, sums are in
the dtype of q, and the real tokens of a row come before its padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .padding import put_back, real_first, take, zero_padding
from .precision import compute_dtype


class Window(NamedTuple):
    """The range of keys that a query sees, and the blocks that contain them."""

    before: int  # number of keys before the query
    after: int  # number of keys after it
    size: int  # S, the tokens of a block
    blocks_before: int  # number of compared blocks before the query's own
    blocks_after: int  # number of compared blocks after it


def sliding_window(before: int, after: int, n: int) -> Window:
    """At most ``before`` keys before a query and ``after`` after it, for n tokens.

    Blocks of half the reach: a query is compared with a quarter more keys than it sees if both are equal, with a half
    more if one is 0.
    """
    any_length = torch.compiler.is_compiling()  # a graph must not depend on the length
    if not any_length:
        before, after = min(before, n - 1), min(after, n - 1)
    size = max((max(before, after) + 1) // 2, 32)  # smaller products are not faster
    if not any_length:
        size = min(size, n)
    return Window(before, after, size, (before + size - 1) // size, (after + size - 1) // size)


def own_chunk(chunk_size: int, causal: bool, n: int) -> Window:
    """Keys of the query's own chunk, up to itself if ``causal``, for n tokens."""
    # A shorter sequence is one smaller chunk.
    size = chunk_size if torch.compiler.is_compiling() else min(chunk_size, n)
    return Window(size, 0 if causal else size, size, 0, 0)


class Tokens(NamedTuple):
    """q, k, v (B, H, n, channels) with the real tokens of each row first and padding 0, and their order."""

    q: Tensor  # divided by √d
    k: Tensor
    v: Tensor
    seen: Tensor  # bool (B or 1, 1, n, 1): the real tokens
    order: Tensor | None  # (B, n), as for ``take``


def real_tokens_first(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
) -> Tokens:
    """Bring q, k and v into ``Tokens``, in float32 or float64; masks (B, n), True = padding. O(n (d + e))."""
    dtype = compute_dtype(q)
    q, k, v = q.to(dtype) * q.shape[3] ** -0.5, k.to(dtype), v.to(dtype)
    q = zero_padding(q, query_padding_mask)
    if key_padding_mask is None:
        seen = torch.ones(1, 1, q.shape[2], 1, dtype=torch.bool, device=q.device)
        return Tokens(q, k, v, seen, None)
    q, k, v = (
        zero_padding(q, key_padding_mask),
        zero_padding(k, key_padding_mask),
        zero_padding(v, key_padding_mask),
    )
    order = real_first(key_padding_mask)
    count = (~key_padding_mask).sum(1, keepdim=True)  # (B, 1)
    seen = torch.arange(q.shape[2], device=q.device) < count
    return Tokens(take(q, order), take(k, order), take(v, order), seen[:, None, :, None], order)


def as_they_came(
    out: Tensor, tokens: Tokens, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
) -> Tensor:
    """The outputs of ``tokens`` (B, H, n, e) in the original order; 0 for padding, as a key or as a query."""
    return zero_padding(zero_padding(put_back(out, tokens.order), key_padding_mask), query_padding_mask)


def split_blocks(x: Tensor, size: int) -> Tensor:
    """(B, H, n, c) -> (B, H, G, S, c) with G = ceil(n / S), zeros or False after the end."""
    if torch.compiler.is_compiling():
        # A graph for any length would specialise on one block, and cannot prove that a reshape is valid.
        groups = x.shape[2] // size + 2
        return F.pad(x, [0, 0, 0, groups * size - x.shape[2]]).unfold(2, size, size).transpose(-2, -1)
    groups = (x.shape[2] + size - 1) // size
    padded = F.pad(x, [0, 0, 0, groups * size - x.shape[2]])
    return padded.reshape(x.shape[0], x.shape[1], groups, size, x.shape[3])


def join_blocks(x: Tensor, n: int) -> Tensor:
    """The inverse of ``split_blocks``: (B, H, G, S, c) -> (B, H, n, c)."""
    return _first(x.flatten(2, 3), n)


def _first(x: Tensor, n: int) -> Tensor:
    """The first n of at least n tokens."""
    if torch.compiler.is_compiling():
        x = F.pad(x, [0, 0, 0, n])  # so that a graph for any length can prove that there are n
    return x[:, :, :n]


def with_neighbours(blocks: Tensor, before: int, after: int) -> Tensor:
    """Each block with its neighbours: (B, H, G, S, c) -> (B, H, G, K, c) with K = (before + 1 + after) S.

    Zeros or False outside of the sequence.
    """
    if before == 0 and after == 0:
        return blocks
    groups = blocks.shape[2]
    padded = F.pad(blocks, [0, 0, 0, 0, before, after])
    return torch.cat([padded[:, :, i : i + groups] for i in range(before + 1 + after)], dim=3)


def hide(scores: Tensor, visible: Tensor) -> Tensor:
    """``scores`` with keys that are not ``visible``, a mask that broadcasts, excluded from a softmax.

    Their scores are a very small number and not -inf, which would give NaN for a query that sees nothing. Such a query
    gets some mean of its keys; only padding sees nothing.
    """
    return scores.masked_fill(~visible, -1e30)


def scores_in_window(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Scores (B, H, G, S, K) of queries in blocks with the keys near them, hidden outside of ``window``; their values.

    Arguments as in ``window_softmax``; the values are (B, H, G, K, e).
    """
    size, before, after = window.size, window.blocks_before, window.blocks_after
    near_k, near_v, near_seen = (with_neighbours(split_blocks(x, size), before, after) for x in (k, v, seen))
    place = torch.arange(size, device=q.device) + before * size
    distance = place.unsqueeze(1) - torch.arange(near_k.shape[3], device=q.device)  # (S, K): of a key before the query
    visible = near_seen.transpose(-2, -1) & (distance <= window.before) & (distance >= -window.after)
    return hide(split_blocks(q, size) @ near_k.transpose(-2, -1), visible), near_v


def window_softmax(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, window: Window, further: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention to the keys in ``window``, and the weights of further keys under the same normaliser.

    q, k (B, H, n, d), v (B, H, n, e), ``seen`` bool (B or 1, 1, n, 1), False for keys that no query sees in a window,
    ``further`` None or scores (B, H, G, S, m) of other keys for the queries in blocks, hidden if they are not visible
    -> the sum over the window (B, H, n, e) and the weights (B, H, G, S, m) with which the caller sums the other values.
    O(n K (d + e)) time and O(n (K + m)) memory; see ``sliding_window`` for K.
    """
    n, (scores, near_v) = q.shape[2], scores_in_window(q, k, v, seen, window)
    keys = near_v.shape[3]
    if further is not None:
        scores = torch.cat([scores, further], dim=-1)
    weights = scores.softmax(-1)
    return join_blocks(weights[..., :keys] @ near_v, n), weights[..., keys:]


def scores_of_all(q: Tensor, k: Tensor) -> Tensor:
    """Scores of queries in blocks (B, H, G, S, d) with keys (B, H, m, d) that are the same for all queries.

    -> (B, H, G, S, m), O(n m d).
    """
    if torch.compiler.is_compiling():  # see ``split_blocks``
        return q @ k.transpose(-2, -1).unsqueeze(2)
    return (q.flatten(2, 3) @ k.transpose(-2, -1)).reshape(q.shape[0], q.shape[1], q.shape[2], q.shape[3], k.shape[2])


def sums_of_all(weights: Tensor, v: Tensor, n: int) -> Tensor:
    """Values (B, H, m, e) under the ``weights`` of queries in blocks, (B, H, G, S, m) -> (B, H, n, e)."""
    return _first(weights.flatten(2, 3) @ v, n)


def softmax_over_all(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of a few queries (B, H, g, d) to all keys that are ``seen``, (B or 1, 1, n, 1); O(g n (d + e))."""
    return hide(q @ k.transpose(-2, -1), seen.transpose(-2, -1)).softmax(-1) @ v


def first_tokens(x: Tensor, count: int) -> Tensor:
    """The first ``count`` tokens of x (B, H, n, c), filled with zeros or False if it has fewer."""
    return F.pad(x, [0, 0, 0, count])[:, :, :count]
