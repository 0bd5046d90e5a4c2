"""The gated delta rule in chunks, in plain PyTorch. ``README.md`` derives it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..shared.chunks import chunk_length, decay_between, reverse_cumsum, split_chunks
from ..shared.tracing import may_checkpoint, runs_eagerly

#: Default number of tokens of a chunk.
CHUNK_SIZE = 32
#: Number of chunks of a part of a sequence; they are computed one after the other, in the same steps for all parts.
_IN_TURN = 8
#: Numbers of q in a block: on a CPU so that a block's tensors fit its cache, elsewhere so that they fit any memory.
_CACHED_NUMBERS, _MOST_NUMBERS = 2**17, 2**22


class Chunks(NamedTuple):
    """Chunks of a sequence: (B, H, G, C, ...)."""

    q: Tensor  # (B, H, G, C, d)
    k: Tensor  # (B, H, G, C, d)
    v: Tensor  # (B, H, G, C, e)
    beta: Tensor  # (B, H, G, C)
    log_decay: Tensor | None  # (B, H, G, C), (B, H, G, C, d) for channels of the keys, or None without decay


def delta_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, memory: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """``delta_chunks`` in blocks of whole chunks, which the backward pass computes again: the inputs and the memory

    before each block are kept. A graph that is traced is computed as one block.
    """
    tensors = (q, k, v, beta, log_decay)
    if not runs_eagerly(memory, *(x for x in tensors if x is not None)):
        return delta_chunks(*tensors, chunk_size, memory)
    most = _CACHED_NUMBERS if q.device.type == "cpu" else _MOST_NUMBERS
    size = _chunk(chunk_size, q.shape[2], log_decay)
    size *= max(1, most // max(1, size * q.shape[:2].numel() * q.shape[3]))
    again, out = q.shape[2] > chunk_size and may_checkpoint(), []
    for begin in range(0, q.shape[2], size):
        block = [None if x is None else x[:, :, begin : begin + size] for x in tensors]
        arguments = *block, chunk_size, memory, True
        if again:
            part, memory = checkpoint(delta_chunks, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            part, memory = delta_chunks(*arguments)
        out.append(part)
    return torch.cat(out, dim=2) if out else v.new_empty(v.shape), memory


def delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    chunk_size: int,
    memory: Tensor,
    in_turn: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, n, e) that q (B, H, n, d) read from the memory (B, H, d, e) after each token, and the last memory.

    k (B, H, n, d), v (B, H, n, e), ``beta`` and ``log_decay`` (B, H, n), the latter at most 0 or None, or (B, H, n, d)
    for a decay of each channel of the keys; ``memory`` is before the first token. Where ``beta`` and ``log_decay`` are
    0, it does not change. O(n (C (C + d + e) + d e + d² (d + e) / C)) time, O(n (C + d + e) + (n / C) d (d + e))
    memory. ``in_turn``: one chunk after the other, in a loop as long as the sequence, without what has a d² there.
    """
    size = _chunk(chunk_size, q.shape[2], log_decay)
    chunks = Chunks(*(None if x is None else split_chunks(x, size) for x in (q, k, v, beta, log_decay)))
    seen, scores, since_start, until_end = _decayed(chunks)
    fixed, read = _errors(chunks, seen, since_start)
    # A chunk turns the memory S into S + change S + added.
    keys = (chunks.k * chunks.beta.unsqueeze(-1) * until_end).transpose(-2, -1)  # (B, H, G, d, C)
    decay = since_start[..., -1, :, None]  # (B, H, G, 1 or d, 1)
    if in_turn:
        before, memory = _states_in_turn(fixed, read, keys, decay, memory)
    else:
        change = (decay - 1) * torch.eye(k.shape[3], dtype=k.dtype, device=k.device) - keys @ read
        before, memory = _states(change, keys @ fixed, memory)
    errors = (fixed - read @ before) * chunks.beta.unsqueeze(-1)
    out = scores @ errors + (chunks.q * since_start) @ before
    return out.flatten(2, 3)[:, :, : q.shape[2]], memory


def _chunk(chunk_size: int, length: int, log_decay: Tensor | None) -> int:
    """Tokens of a chunk; with a decay of each channel a power of two, which ``_products_of_channels`` needs."""
    if log_decay is None or log_decay.dim() == 3:
        return chunk_length(chunk_size, length)
    return 1 << (chunk_size - 1).bit_length()


def _decayed(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products in chunks that have decayed from key to query, 0 for keys that come later, and decays, each at most 1.

    These are products of keys and of queries with keys, (..., C, C) each, and decays from the start to a token, with
    its own, and from a token to the end, without its own, (..., C, 1) or (..., C, d).
    """
    q, k, log_decay = chunks.q, chunks.k, chunks.log_decay
    if log_decay is not None and log_decay.dim() == k.dim():
        since_start = log_decay.cumsum(-2).exp()
        until_end = _sums_after(log_decay).exp()
        return _products_of_channels(k, k, log_decay), _products_of_channels(q, k, log_decay), since_start, until_end
    if log_decay is None:
        size, ones = k.shape[-2], torch.ones_like(chunks.beta).unsqueeze(-1)
        inside, since_start, until_end = k.new_ones(size, size).tril(), ones, ones
    else:
        inside = decay_between(log_decay)
        since_start, until_end = log_decay.cumsum(-1).exp().unsqueeze(-1), inside[..., -1, :].unsqueeze(-1)
    keys = k.transpose(-2, -1)
    return k @ keys * inside, q @ keys * inside, since_start, until_end


def _sums_after(x: Tensor) -> Tensor:
    """Sums over the tokens after each one, (..., C, d) -> (..., C, d)."""
    sums = reverse_cumsum(x.transpose(-2, -1))
    # torch 2.6 cannot compile the backward pass of F.pad for blocks of one token, which leave nothing to pad.
    return torch.cat([sums[..., 1:], torch.zeros_like(sums[..., :1])], dim=-1).transpose(-2, -1)


def _products_of_channels(a: Tensor, b: Tensor, log_decay: Tensor) -> Tensor:
    """Σ_c a_ic b_jc exp(Σ log_decay_tc over j < t <= i) for i >= j, otherwise 0: (..., C, d) each -> (..., C, C).

    C is a power of two. Of two neighbouring blocks, the queries of the second and the keys of the first are decayed
    from and to their border, so no factor is above 1 and each sum is formed separately. O(C (C + log C) d).
    """
    products, size = (a * b).sum(-1)[..., None, None], 1  # (..., C, 1, 1), of blocks of one token
    while size < a.shape[-2]:
        (_, queries), (keys, _), (first, second) = (
            x.unflatten(-2, (-1, 2, size)).unbind(-3) for x in (a, b, log_decay)
        )
        lower = (queries * second.cumsum(-2).exp()) @ (keys * _sums_after(first).exp()).transpose(-2, -1)
        upper_left, lower_right = products.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([upper_left, torch.zeros_like(lower)], dim=-1)
        products = torch.cat([upper, torch.cat([lower, lower_right], dim=-1)], dim=-2)
        size *= 2
    return products.squeeze(-3)


def _errors(chunks: Chunks, seen: Tensor, since_start: Tensor) -> tuple[Tensor, Tensor]:
    """E0 (B, H, G, C, e) and W (B, H, G, C, d): the tokens' errors are E0 - W S for the memory S before the chunk."""
    seen = seen.tril(-1) * chunks.beta.unsqueeze(-2)
    identity = torch.eye(seen.shape[-1], dtype=seen.dtype, device=seen.device)
    # Solving for the identity and multiplying takes half the time of solving for these columns.
    inverse = torch.linalg.solve_triangular(seen + identity, identity, upper=False, unitriangular=True)
    return inverse @ chunks.v, inverse @ (chunks.k * since_start)


def _states_in_turn(fixed: Tensor, read: Tensor, keys: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The memory before each chunk, (B, H, G, d, e), and the last.

    S_(g+1) = decay_g S_g + keys_g (fixed_g - read_g S_g).
    """
    before = []
    for fixed_g, read_g, keys_g, decay_g in zip(*(x.unbind(2) for x in (fixed, read, keys, decay))):
        before.append(state)
        state = decay_g * state + keys_g @ (fixed_g - read_g @ state)
    return torch.stack(before, dim=2), state


def _states(change: Tensor, added: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """S_(g+1) = S_g + change_g S_g + added_g with S_0 = ``first`` (B, H, d, e): those before each chunk, and the last.

    ``change`` (B, H, G, d, d), ``added`` (B, H, G, d, e) -> (B, H, G, d, e), (B, H, d, e). Some chunks after the other,
    all parts of so many at once, and the parts in the same way: no loop is as long as the sequence, so one traced graph
    is for many numbers of chunks.
    """
    groups = change.shape[2]
    parts = (groups + _IN_TURN - 1) // _IN_TURN
    # Appended chunks of zeros change nothing.
    change, added = (F.pad(x, (0, 0, 0, 0, 0, parts * _IN_TURN - groups)) for x in (change, added))
    change, added = (x.unflatten(2, (parts, _IN_TURN)).unbind(3) for x in (change, added))
    if groups <= _IN_TURN:
        state = first.unsqueeze(2)
    else:
        part_change, part_added = change[0], added[0]
        for extra_change, extra_added in zip(change[1:], added[1:]):
            part_change = part_change + extra_change + extra_change @ part_change
            part_added = part_added + extra_added + extra_change @ part_added
        state, _ = _states(part_change, part_added, first)
    before = []
    for one_change, one_added in zip(change, added):
        before.append(state)
        state = state + one_added + one_change @ state
    return torch.stack(before, dim=3).flatten(2, 3)[:, :, :groups], state[:, :, -1]
