"""BigBird: softmax over neighbouring chunks, the first and the last one, and random ones.

Zaheer, Guruganesh, Dubey, Ainslie, Alberti, Ontanon, Pham, Ravula, Wang, Yang, Ahmed, *Big Bird: Transformers for
Longer Sequences*, NeurIPS 2020, section 2 and appendix D, without global tokens in addition to those of the sequence.
"""

import torch
from torch import Tensor

from ..shared.checks import check_masks, check_positive_int, check_query_key_value
from ..shared.packed import takes_segments
from ..shared.padding import take
from ..shared.precision import autocast_off
from ..shared.window_softmax import (
    Window,
    as_they_came,
    hide,
    join_blocks,
    real_tokens_first,
    softmax_over_all,
    split_blocks,
    window_softmax,
)
from .random_chunks import choose_chunks


@takes_segments("q", "k", "v")
def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    *,
    chunk_size: int,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """softmax(q·k / √d) v over some chunks of C = ``chunk_size`` tokens for each query, not causal.

    A query sees its own chunk, the chunks before and after it, the first and the last chunk, and r random chunks, which
    ``numbers`` (rows, r) of ``draw_numbers`` select; see ``choose_chunks``. Queries of the first and the last chunk see
    all tokens. Chunks count real keys only: the last chunk is that of the last real key and may be partly filled, and
    random chunks are real. q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True =
    padding; a token that is padding, as a key or as a query, gives 0. Cost: O(n (5 + r) C (d + e)) time, O(n (5 + r) C)
    memory.

    All heads have the same random chunks. The paper calls a chunk a block; its size is part of the model. In
    transformers the last chunk and the random chunks are chosen by the padded length, and in evaluation each random
    chunk is the first chunk again.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask or number that does not fit.
    """
    check_positive_int("chunk_size", chunk_size)
    check_query_key_value(q, k, v, one_length=True)
    if not isinstance(numbers, Tensor) or numbers.dim() != 2 or len(numbers) == 0 or numbers.dtype != torch.int64:
        given = f"{tuple(numbers.shape)}, {numbers.dtype}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ValueError(f"numbers is {given}; allowed: a tensor (rows, random chunks), torch.int64")
    check_masks(key_padding_mask, k, query_padding_mask, q)
    with autocast_off(q):
        tokens = real_tokens_first(q, k, v, key_padding_mask, query_padding_mask)
        n, batch = q.shape[2], q.shape[0]
        if not torch.compiler.is_compiling():
            chunk_size = min(chunk_size, n)  # a shorter sequence is one smaller chunk
        q_chunks, k_chunks = split_blocks(tokens.q, chunk_size), split_blocks(tokens.k, chunk_size)  # (B, H, G, C, d)
        v_chunks = split_blocks(tokens.v, chunk_size)
        count = tokens.seen.sum([1, 2, 3]).unsqueeze(1)  # (B or 1, 1)
        last = (count - 1).clamp(min=0) // chunk_size
        index, valid = _further_chunks(numbers, q_chunks.shape[2], last)  # (B or 1, G, 2 + r)
        chosen = index.expand(batch, -1, -1)
        extra_k, extra_v = _gather(k_chunks, chosen), _gather(v_chunks, chosen)
        position = index.unsqueeze(-1) * chunk_size + torch.arange(chunk_size, device=q.device)  # (B or 1, G, 2 + r, C)
        visible = (valid.unsqueeze(-1) & (position < count[:, :, None, None])).flatten(2)
        further = hide(q_chunks @ extra_k.transpose(-2, -1), visible[:, None, :, None])
        window = Window(2 * chunk_size, 2 * chunk_size, chunk_size, 1, 1)
        out, weights = window_softmax(tokens.q, tokens.k, tokens.v, tokens.seen, window, further)
        out = out + join_blocks(weights @ extra_v, n)
        out = _with_ends(out, _over_all(q_chunks, tokens.k, tokens.v, tokens.seen, last), last, chunk_size)
        return as_they_came(out, tokens, key_padding_mask, query_padding_mask).to(v.dtype)


def _further_chunks(numbers: Tensor, groups: int, last: Tensor) -> tuple[Tensor, Tensor]:
    """The first, the last and the random chunks (B, G, 2 + r); False where a chunk is already seen as a neighbour."""
    chosen, valid = choose_chunks(numbers, groups, last)
    chunk = torch.arange(groups, device=last.device).expand(last.shape[0], groups)
    ends = torch.stack([torch.zeros_like(chunk), last.expand_as(chunk)], dim=-1)
    apart = (chunk.unsqueeze(-1) - ends).abs() > 1
    return torch.cat([ends, chosen], dim=-1), torch.cat([apart, valid], dim=-1)


def _gather(chunks: Tensor, index: Tensor) -> Tensor:
    """Chunks (B, H, G, C, c) at ``index`` (B, G, m), concatenated: (B, H, G, m C, c)."""
    flat, shape = chunks.flatten(3), chunks.shape[3:]
    gathered = [take(flat, index[:, :, s]).unflatten(3, shape) for s in range(index.shape[2])]
    return torch.cat(gathered, dim=3)


def _over_all(q_chunks: Tensor, k: Tensor, v: Tensor, seen: Tensor, last: Tensor) -> Tensor:
    """Attention of the first and the last chunk's queries to all keys, (B, H, 2C, e)."""
    ends = torch.stack([torch.zeros_like(last), last], dim=-1).expand(q_chunks.shape[0], -1, -1)  # (B, 1, 2)
    return softmax_over_all(_gather(q_chunks, ends).squeeze(2), k, v, seen)


def _with_ends(out: Tensor, ends: Tensor, last: Tensor, chunk_size: int) -> Tensor:
    """``out`` (B, H, n, e) with the tokens of the first and the last chunk, ``ends`` (B, H, 2C, e), in their places."""
    position = torch.arange(out.shape[2], device=out.device)
    from_last = position - last * chunk_size  # (B or 1, n)
    first = (position < chunk_size).expand_as(from_last)
    is_end = first | ((from_last >= 0) & (from_last < chunk_size))
    index = torch.where(first, position, chunk_size + from_last.clamp(0, chunk_size - 1))
    return torch.where(is_end[:, None, :, None], take(ends, index.expand(out.shape[0], -1)), out)
