"""Causal mixed chunk attention from a state: its shapes, one step, several tokens at once.

The state holds rings of C slots. A token is written to the slot of its position mod C, so slots below count mod C hold
the current chunk, and the others the chunk before it. ``sum_kv`` is the sum over the tokens that have been overwritten:
each step overwrites one, which moves it from the chunk before into the sum, so that all steps cost the same.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.chunks import carry_sums
from ..shared.padding import invert, real_first, take
from ..shared.precision import compute_dtype
from ..shared.relative_bias import bias_at
from ..shared.score_kernels import score_kernel
from ..shared.state import State
from .sequence import MixedChunkOptions, Tokens, both_terms, chunk_sums, hidden_keys, score_divisor, split


def state_shapes(tokens: Tokens, chunk_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state."""
    batch, heads, _, s = tokens.k_quad.shape
    e = tokens.v.shape[3]
    return {
        "count": (batch,),
        "sum_kv": (batch, heads, s, e),
        "k_quad": (batch, heads, chunk_size, s),
        "k_lin": (batch, heads, chunk_size, s),
        "v": (batch, heads, chunk_size, e),
    }


def empty_state(tokens: Tokens, chunk_size: int) -> State:
    """The state before the first token."""
    like = {"dtype": compute_dtype(tokens.v), "device": tokens.v.device}
    state = {name: torch.zeros(shape, **like) for name, shape in state_shapes(tokens, chunk_size).items()}
    state["count"] = state["count"].long()
    return state


def step(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """One token after ``state``: its output (B, H, 1, e) and the next state; O(C (s + e) + s e) at every position."""
    size = options.chunk_size
    slot = state["count"] % size  # (B,)
    index = slot[:, None, None, None]
    rings: dict[str, Tensor] = {}
    overwritten = {}
    for name in ("k_quad", "k_lin", "v"):
        ring, new = state[name], getattr(tokens, name)
        at = index.expand(-1, ring.shape[1], 1, ring.shape[3])
        overwritten[name] = ring.gather(2, at)  # (B, H, 1, c)
        rings[name] = ring.scatter(2, at, new)
    sum_kv = state["sum_kv"] + overwritten["k_lin"].transpose(-2, -1) @ overwritten["v"]
    earlier = torch.arange(size, device=slot.device) > index  # (B, 1, 1, C): slots of the chunk before
    out = None
    if options.local:
        scores = tokens.q_quad / score_divisor(options, tokens.q_quad.shape[3]) @ rings["k_quad"].transpose(-2, -1)
        if bias is not None:
            scores = scores + bias_at(bias, size, slot[:, None])
        out = score_kernel(scores, options.kernel, earlier) @ rings["v"]
    if options.linear:
        q_lin = tokens.q_lin / size
        weights = (q_lin @ rings["k_lin"].transpose(-2, -1)).masked_fill(~earlier, 0.0)
        across = weights @ rings["v"] + q_lin @ sum_kv
        out = across if out is None else out + across
    new_state = {"count": state["count"] + 1, "sum_kv": sum_kv, **rings}
    if padding_mask is not None:  # a padded token leaves its row's state as it was
        keep = padding_mask[:, 0]
        new_state = {
            name: torch.where(keep.view(-1, *[1] * (x.dim() - 1)), state[name], x) for name, x in new_state.items()
        }
    return out, new_state


def several(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """n tokens after ``state``, as a sequence of its two chunks and them: outputs (B, H, n, e) and the next state."""
    batch, n, size = tokens.v.shape[0], tokens.v.shape[2], options.chunk_size
    slot = (state["count"] % size)[:, None]  # (B, 1)
    current = torch.arange(size, device=slot.device) < slot  # (B, C): slots of the current chunk
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    frame_padding = torch.cat([torch.zeros_like(current), ~current, padding_mask], dim=1)  # (B, 2C + n)
    order = real_first(frame_padding)
    no_queries = torch.zeros_like(state["k_lin"])  # the state holds none, and needs none
    frame = []
    for name, x in zip(Tokens._fields, tokens):
        ring, now = state.get(name, no_queries), current[:, None, :, None]
        parts = [ring.masked_fill(now, 0.0), ring.masked_fill(~now, 0.0), x]  # chunk before, current chunk, new tokens
        frame.append(take(torch.cat(parts, dim=2), order))
    frame = Tokens(*frame)
    # One chunk more, so that there is always one after the last full one.
    chunks = split(Tokens(*(F.pad(x, (0, 0, 0, size)) for x in frame)), size)
    sums, _ = carry_sums(chunk_sums(chunks), state["sum_kv"])  # (B, H, G, s, e): before each chunk
    hidden = hidden_keys(chunks, options, n, None)
    out = both_terms(chunks, sums if options.linear else None, bias, options, hidden, frame, None)
    out = take(out[:, :, : 2 * size + n], invert(order))[:, :, 2 * size :]
    end = size + slot + (~padding_mask).sum(1, keepdim=True)  # (B, 1): real tokens of the frame
    new_state = _state_at(chunks, sums, end, size)
    new_state["count"] = state["count"] + (~padding_mask).sum(1)
    return out, new_state


def _state_at(chunks: Tokens, sums: Tensor, end: Tensor, size: int) -> State:
    """Rings and sum after ``end`` (B, 1) tokens of ``chunks`` (B, H, G, C, c); ``sums`` are those before each chunk."""
    group = (end // size)[:, :, None, None, None]  # (B, 1, 1, 1, 1), at least 1
    filled = (torch.arange(size, device=end.device) < end % size)[:, None, :, None]  # (B, 1, C, 1)

    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(2, index.expand(-1, x.shape[1], 1, *x.shape[3:])).squeeze(2)  # (B, H, G, ...) -> (B, H, ...)

    before = {name: pick(getattr(chunks, name), group - 1) for name in ("k_quad", "k_lin", "v")}
    state = {name: torch.where(filled, pick(getattr(chunks, name), group), x) for name, x in before.items()}
    overwritten = before["k_lin"].masked_fill(~filled, 0.0).transpose(-2, -1) @ before["v"]
    state["sum_kv"] = pick(sums, group - 1) + overwritten
    return state
