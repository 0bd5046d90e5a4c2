"""Causal Flow-Attention in chunks: Flowformer (ICML 2022), Algorithm 2, exactly. Legend: ``flow_attention``.

With P = q kᵀ inside a chunk, L = tril(P), U = triu(P), and x̄ the sum of x over all earlier chunks, every running sum of
Algorithm 2 splits into a part inside the chunk and a carried part, for example
I = rowsum(L) + q·k̄, O = columnsum(U) + k·q̄ and Î = L (1/O) + q·(k/O)‾. One C x C product serves all five.

Sinks and sources do the same with each other, so that both are one tensor: its first dimension, the *side*, is 0 for
sinks and 1 for sources, and ``flip(0)`` gives each what the other side has.
"""

from typing import Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .checks import State
from .chunks import carry_sums, compute_dtype, split_chunks, zero_padding
from .feature_maps import real_features
from .flow_attention_causal_weights import Positions, flow_scale, flow_weights
from .flow_options import FlowForm, FlowOptions, positive


class CausalInput(NamedTuple):
    """What every form of causal Flow-Attention is given."""

    q: Tensor  # (B, H, n, d)
    k: Tensor  # (B, H, n, d)
    v: Tensor  # (B, H, n, e)
    padding: Optional[Tensor]  # bool (B, n), True = padding
    options: FlowOptions
    chunk_size: int  # C; a shorter input is one chunk of its own length
    state: Optional[State]  # after the tokens before these


class Scores(NamedTuple):
    """P = q kᵀ inside of each chunk, (B, H, G, C, C), as far as it is causal."""

    to_sinks: Tensor  # L, sink i, source j <= i
    to_sources: Tensor  # U, sink i, source j >= i


class ChunkFlow(NamedTuple):
    """The flows of Algorithm 2, and what they are made of, (2, B, H, G, C) where not said otherwise."""

    totals: Tensor  # sums of the features over d
    carried: Tensor  # sums of the features over all earlier chunks (2, B, H, G, d)
    carried_over: Tensor  # the same sums of the features times ``over``
    plain: Tensor  # I and O, not divided by any count
    over: Tensor  # c / I, by which Ô weighs the sinks, and c / O, by which Î weighs the sources
    conserved: Tensor  # Î and Ô, not divided by any count
    competition: Tensor  # weight of every source (B, H, G, C)
    allocation: Tensor  # weight of every sink (B, H, G, C)


def state_shapes(q: Tensor, v: Tensor) -> Dict[str, Tuple[int, ...]]:
    """The shape of every tensor of a state."""
    batch, heads, _, d = q.shape
    vectors = ("sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming")
    return {
        "count": (batch,),
        **{name: (batch, heads, d) for name in vectors},
        "log_competition": (batch, heads),
        "log_allocation": (batch, heads),
        "sum_kv": (batch, heads, d, v.shape[3]),
    }


def attention_in_chunks(given: CausalInput) -> Tuple[Tensor, State]:
    """Algorithm 2: the output (B, H, n, e) and the state after the tokens.

    O(n (C d + d e)) time, O(n (C + d + e) + (n / C) d e) memory.
    """
    total, scale, after, _ = chunks_forward(given)
    return total * scale, after


def chunks_forward(given: CausalInput) -> Tuple[Tensor, Tensor, State, ChunkFlow]:
    """The output as the sum in the last line of Algorithm 2 (B, H, n, e) and its factors (B, H, n, 1); state, flows."""
    q, k, v, padding, options, chunk_size, state = given
    length, size = q.shape[2], min(chunk_size, q.shape[2])
    positions = chunk_positions(q, padding, size, state)
    features = chunk_features(q, k, options.phi, padding, size)
    scores = chunk_scores(features)
    flow, after = causal_flow(features, scores, positions, options, state)
    (q, k), to_sinks, scale = features.unbind(), scores.to_sinks, flow_scale(flow.allocation, flow.plain[0])
    del scores  # U, before more is made
    # Contiguous, since each product of many small matrices would copy others.
    v = (chunk_values(v, padding, size) * flow.competition.unsqueeze(-1)).contiguous()
    earlier, after["sum_kv"] = carry_sums(k.transpose(-2, -1) @ v, None if state is None else state["sum_kv"])
    # (B, H, G, ...) -> (B H G, ...), so that one product is added to the other as it is formed
    total, to_sinks, values = (x.flatten(0, 2) for x in (q @ earlier, to_sinks, v))
    total = total.baddbmm_(to_sinks, values).view_as(v)
    return joined(total, length), joined(scale, length).unsqueeze(-1), after, flow


def chunk_positions(q: Tensor, padding: Optional[Tensor], size: int, state: Optional[State]) -> Positions:
    """Positions of the tokens of q (B, H, n, d) in chunks of ``size``, behind those of ``state``."""
    earlier = None if state is None else state["count"]
    batch, length = q.shape[0], q.shape[2]
    if padding is None:
        count = torch.arange(1, length + 1, device=q.device).expand(1 if earlier is None else batch, length)
    else:
        count = (~padding).cumsum(1)
    if earlier is not None:
        count = count + earlier[:, None]
    total = count[:, -1].expand(batch).clone()
    excluded = None
    if padding is not None or length % size:
        excluded = torch.zeros(1, length, dtype=torch.bool, device=q.device) if padding is None else padding
        excluded = ~split_chunks(~excluded[:, None], size)  # what split_chunks appends is left out too
    return Positions(split_chunks(count[:, None], size).clamp(min=1).to(compute_dtype(q)), excluded, total)


def chunk_features(q: Tensor, k: Tensor, phi: str, padding: Optional[Tensor], size: int) -> Tensor:
    """phi(q) and phi(k), zero at padding, in chunks: (B, H, n, d) -> (2, B, H, G, C, d)."""
    both = torch.stack([x.to(compute_dtype(x)) for x in (q, k)])  # (2, B, H, n, d)
    features = real_features(both, phi, padding).flatten(0, 1)
    return split_chunks(features, size).unflatten(0, (2, q.shape[0]))


def chunk_values(v: Tensor, padding: Optional[Tensor], size: int) -> Tensor:
    """v, zero at padding, in chunks: (B, H, n, e) -> (B, H, G, C, e)."""
    return split_chunks(zero_padding(v.to(compute_dtype(v)), padding), size)


def chunk_scores(features: Tensor) -> Scores:
    """From the features (2, B, H, G, C, d); O(n C d)."""
    q, k = features.unbind()
    scores = q @ k.transpose(-2, -1)
    lower = torch.ones(scores.shape[-2:], dtype=q.dtype, device=q.device).tril()
    to_sources = scores * lower.T
    return Scores(scores.mul_(lower), to_sources)


def causal_flow(
    features: Tensor, scores: Scores, positions: Positions, options: FlowOptions, initial: Optional[State]
) -> Tuple[ChunkFlow, State]:
    """All of Algorithm 2 but its last line from the features (2, B, H, G, C, d); the state lacks ``sum_kv``."""
    to_sinks, to_sources = scores
    totals = features.sum(-1)
    carried, sums = carry_sides(features.sum(-2), side_sums(initial, "sum_q", "sum_k"))
    inside = torch.stack([to_sinks.sum(-1), to_sources.sum(-2)])
    plain = _received(inside, features, totals, carried, options.form)
    over = positions.count / positive(plain)  # I and O are means over the count, so their reciprocals carry it
    initial_over = side_sums(initial, "sum_q_over_incoming", "sum_k_over_outgoing")
    carried_over, sums_over = carry_sides(row_times(over, features), initial_over)
    inside = torch.stack([times_column(to_sinks, over[1]), row_times(over[0], to_sources)])
    conserved = _received(inside, features, totals * over, carried_over, options.form)
    competition, allocation, logs = flow_weights(*conserved.unbind(), positions, options, initial)
    flow = ChunkFlow(totals, carried, carried_over, plain, over, conserved, competition, allocation)
    # Clones: tensors of a state are changed in place by who gets them, and share no memory.
    (sum_q, sum_k), (sum_q_in, sum_k_out) = ([x.clone() for x in pair.unbind()] for pair in (sums, sums_over))
    sums = {"sum_k": sum_k, "sum_q": sum_q, "sum_k_over_outgoing": sum_k_out, "sum_q_over_incoming": sum_q_in}
    return flow, {"count": positions.total, **sums, **logs}


def side_sums(state: Optional[State], of_sinks: str, of_sources: str) -> Optional[Tensor]:
    """Two sums of a state as (2, B, H, d)."""
    return None if state is None else torch.stack([state[of_sinks], state[of_sources]])


def carry_sides(chunk_sums: Tensor, initial: Optional[Tensor], reverse: bool = False) -> Tuple[Tensor, Tensor]:
    """``carry_sums`` of both sides, (2, B, H, G, d): to before each chunk (2, B, H, G, d), over all (2, B, H, d)."""
    initial = None if initial is None else initial.flatten(0, 1)
    return tuple(x.unflatten(0, chunk_sums.shape[:2]) for x in carry_sums(chunk_sums.flatten(0, 1), initial, reverse))


def joined(chunks: Tensor, length: int) -> Tensor:
    """(B, H, G, C, ...) -> (B, H, n, ...), without what fills the last chunk."""
    return chunks.flatten(2, 3)[:, :, :length]


def row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """row (..., a) times matrix (..., a, b) -> (..., b)."""
    return (row.unsqueeze(-2) @ matrix).squeeze(-2)


def times_column(matrix: Tensor, column: Tensor) -> Tensor:
    """matrix (..., a, b) times column (..., b) -> (..., a), as a row, for which a CPU needs a sixth of the time."""
    return row_times(column, matrix.transpose(-2, -1))


def _received(inside: Tensor, receivers: Tensor, given: Tensor, carried: Tensor, form: FlowForm) -> Tensor:
    """What receivers (2, B, H, G, C, d) get from the other side up to their own position, (2, B, H, G, C).

    ``inside`` (2, B, H, G, C) is what comes from their own chunk, but for eps times ``given``, each giver's sum over d;
    ``carried`` (2, B, H, G, d) are the givers' sums over earlier chunks.
    """
    carried = carried.flip(0) + form.eps
    received = inside + times_column(receivers, carried) + form.outer_eps
    if not form.eps:
        return received
    return received + form.eps * (given.flip(0).cumsum(-1) + carried.sum(-1, keepdim=True))
