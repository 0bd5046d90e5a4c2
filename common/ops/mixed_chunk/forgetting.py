"""Causal mixed chunk attention whose linear term forgets, in plain PyTorch.

The sum Σ k_lin vᵀ over earlier chunks is multiplied by exp(log_decay_t) at each token t, as a running sum is: so a key
of an earlier chunk counts exp(Σ log_decay_t) over the tokens t after it up to the query. The quadratic term, inside a
chunk, forgets nothing. Gates are (B, H, n), by head, or (B, H, n, s), by channel of k_lin.

The state holds the tokens of the current chunk in C slots, 2s + e channels each as in ``decoding``, empty ones 0, and
``sum_kv``, the sum over the chunks before. What of it a query reads has decayed up to the last token: the slots' k_lin
and ``sum_kv`` are kept so.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import ArgumentError
from ..shared.chunks import carry_decayed_sums, chunk_length, reverse_cumsum, split_chunks
from ..shared.padding import invert, put_back, real_first, take
from ..shared.precision import compute_dtype
from ..shared.relative_bias import bias_at
from ..shared.score_kernels import score_kernel
from ..shared.state import State
from .further_terms import FurtherTerms
from .sequence import MixedChunkOptions, Tokens, both_terms, hidden_keys, score_divisor, split


def check_terms(options: MixedChunkOptions, further: FurtherTerms) -> None:
    """Raise ValueError for options that a sum which forgets does not go with."""
    if not options.linear:
        raise ArgumentError("`log_decay` is given; allowed: only with linear=True, whose sum forgets")
    for name, value in further._asdict().items():
        if value:
            raise ArgumentError(f"`log_decay` is given; allowed: without {name}=True")


def state_shapes(tokens: Tokens, chunk_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state."""
    batch, heads, _, s = tokens.k_quad.shape
    e = tokens.v.shape[3]
    return {
        "count": (batch,),
        "sum_kv": (batch, heads, s, e),
        "chunk": (batch, heads, chunk_size, 2 * s + e),
    }


def empty_state(tokens: Tokens, chunk_size: int) -> State:
    """The state before the first token."""
    like = {"dtype": compute_dtype(tokens.v), "device": tokens.v.device}
    state = {name: torch.zeros(shape, **like) for name, shape in state_shapes(tokens, chunk_size).items()}
    state["count"] = state["count"].long()
    return state


def whole_sequence(
    tokens: Tokens, log_decay: Tensor, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """A whole sequence with padding on any side, all in the dtype of sums, 0 at padding: (B, H, n, e)."""
    order = real_first(padding_mask)
    tokens, gates = Tokens(*(take(x, order) for x in tokens)), take(_by_channel(log_decay), order)
    size, n = chunk_length(options.chunk_size, tokens.v.shape[2]), tokens.v.shape[2]
    chunks, _, sums, _ = _decayed_chunks(tokens, gates, None, size)
    out = both_terms(chunks, sums, bias, options, hidden_keys(chunks, options, n, None), tokens, None)
    return put_back(out[:, :, :n], order)


def step(
    tokens: Tokens, log_decay: Tensor, bias: Tensor | None, options: MixedChunkOptions, state: State
) -> tuple[Tensor, State]:
    """One token after ``state``, not padding: its output (B, H, 1, e) and the next state; O(C (s + e) + s e)."""
    size, s = options.chunk_size, tokens.q_quad.shape[3]
    slot, decay = (state["count"] % size)[:, None], _by_channel(log_decay).exp()  # (B, 1), (B, H, 1, 1 or s)
    new = torch.cat([tokens.k_quad, tokens.k_lin, tokens.v], dim=3)
    k_quad, k_lin, v = state["chunk"].split([s, s, tokens.v.shape[3]], dim=3)
    chunk = torch.cat([k_quad, k_lin * decay, v], dim=3)
    chunk = chunk.scatter(2, slot[:, None, :, None].expand_as(new), new)
    sum_kv = state["sum_kv"] * decay.transpose(-2, -1)
    out = (tokens.q_lin / size) @ sum_kv
    k_quad, k_lin, v = chunk.split([s, s, tokens.v.shape[3]], dim=3)
    if options.local:
        scores = (tokens.q_quad / score_divisor(options, s)) @ k_quad.transpose(-2, -1)  # (B, H, 1, C)
        if bias is not None:
            scores = scores + bias_at(bias, size, slot)
        later = (torch.arange(size, device=slot.device) > slot)[:, None, None]
        out = out + score_kernel(scores, options.kernel, later) @ v
    full = (slot == size - 1)[:, :, None, None]  # (B, 1, 1, 1)
    sum_kv = sum_kv + (k_lin.transpose(-2, -1) @ v).masked_fill(~full, 0.0)
    return out, {"count": state["count"] + 1, "sum_kv": sum_kv, "chunk": chunk.masked_fill(full, 0.0)}


def several(
    tokens: Tokens,
    log_decay: Tensor,
    bias: Tensor | None,
    options: MixedChunkOptions,
    padding_mask: Tensor | None,
    state: State,
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as a sequence of the current chunk and them: outputs (B, H, n, e), the next state."""
    batch, _, n, s = tokens.q_quad.shape
    size, e = options.chunk_size, tokens.v.shape[3]
    slot, slots = (state["count"] % size)[:, None], torch.arange(size, device=tokens.v.device)
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    order = real_first(torch.cat([slots >= slot, padding_mask], dim=1))  # (B, C + n)
    keys = torch.cat([state["chunk"], torch.cat([tokens.k_quad, tokens.k_lin, tokens.v], dim=3)], dim=2)
    k_quad, k_lin, v = take(keys, order).split([s, s, e], dim=3)
    # The state holds no queries, and needs none; nor gates, since its keys have decayed already.
    before = (0, 0, size, 0)
    q_quad, q_lin, gates = (
        take(F.pad(x, before), order) for x in (tokens.q_quad, tokens.q_lin, _by_channel(log_decay))
    )
    # One chunk more, so that there is always one after the last full one.
    frame = Tokens(*(F.pad(x, (0, 0, 0, size)) for x in (q_quad, k_quad, q_lin, k_lin, v)))
    chunks, end_keys, sums, decay = _decayed_chunks(frame, F.pad(gates, (0, 0, 0, size)), state["sum_kv"], size)
    out = both_terms(chunks, sums, bias, options, hidden_keys(chunks, options, size + n, None), frame, None)
    out = take(out[:, :, : size + n], invert(order))[:, :, size:]
    real = (~padding_mask).sum(1)
    held = torch.cat([chunks.k_quad, end_keys, chunks.v], dim=4)  # (B, H, G, C, 2s + e)
    end = slot + real[:, None]  # (B, 1): real tokens of the frame
    group = (end // size)[:, :, None, None, None]

    def pick(x: Tensor) -> Tensor:
        return x.gather(2, group.expand(-1, x.shape[1], 1, *x.shape[3:])).squeeze(2)  # (B, H, G, ...) -> (B, H, ...)

    # Tokens after the last real one have no gates: what has decayed to the end of its chunk has decayed up to there.
    chunk = pick(held).masked_fill((slots >= end % size)[:, None, :, None], 0.0)
    return out, {"count": state["count"] + real, "sum_kv": pick(sums) * pick(decay), "chunk": chunk}


def _by_channel(log_decay: Tensor) -> Tensor:
    """(B, H, n) -> (B, H, n, 1); gates by channel as they are."""
    return log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay


def _decayed_chunks(
    tokens: Tokens, gates: Tensor, initial: Tensor | None, size: int
) -> tuple[Tokens, Tensor, Tensor, Tensor]:
    """Chunks whose queries of the linear term have decayed since their chunk began, and what belongs to them.

    k_lin decayed to the end of its chunk (B, H, G, C, s), the sums before each chunk (B, H, G, s, e), and what each
    chunk leaves of them (B, H, G, 1 or s, 1).
    """
    chunks, gates = split(tokens, size), split_chunks(gates, size)  # (B, H, G, C, 1 or s)
    # Over the tokens after a key, so that nothing is subtracted.
    after = F.pad(reverse_cumsum(gates.transpose(3, 4))[..., 1:], (0, 1)).transpose(3, 4)
    end_keys, of_chunk = chunks.k_lin * after.exp(), gates.sum(3)
    sums = _carry(end_keys.transpose(-2, -1) @ chunks.v, initial, of_chunk)
    chunks = chunks._replace(q_lin=chunks.q_lin * gates.cumsum(3).exp())
    return chunks, end_keys, sums, of_chunk.exp().unsqueeze(-1)


def _carry(chunk_sums: Tensor, initial: Tensor | None, gates: Tensor) -> Tensor:
    """The decayed sums before each chunk, from those of each (B, H, G, s, e) and its ``gates`` (B, H, G, 1 or s)."""
    if gates.shape[3] == 1:
        return carry_decayed_sums(chunk_sums, initial, gates.squeeze(3))[0]
    heads, s = chunk_sums.shape[1], chunk_sums.shape[3]
    rows = chunk_sums.transpose(2, 3).flatten(1, 2)  # (B, H s, G, e): each channel as a head
    first = None if initial is None else initial.flatten(1, 2)
    carried, _ = carry_decayed_sums(rows, first, gates.transpose(2, 3).flatten(1, 2))
    return carried.unflatten(1, (heads, s)).transpose(2, 3)
