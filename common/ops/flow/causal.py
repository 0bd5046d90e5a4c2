"""Causal Flow-Attention in chunks of C tokens, in plain PyTorch: Flowformer (ICML 2022), Algorithm 2, exactly.

Every running sum of Algorithm 2 is a sum inside the token's own chunk, from one C x C product, plus a sum carried over
from all earlier chunks; ``README.md`` has the formulas. Sinks and sources are treated symmetrically, so both are one
tensor: its first dimension, the *side*, is 0 for sinks and 1 for sources, and ``flip(0)`` swaps the sides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.chunks import carry_sums, chunk_length, split_chunks
from ..shared.feature_maps import real_features
from ..shared.padding import zero_padding
from ..shared.precision import compute_dtype
from ..shared.state import State, zero_state
from .causal_weights import Positions, flow_weights
from .options import FlowForm, FlowOptions, excluded_logit, replace_zero_by_one


class CausalInputs(NamedTuple):
    """The arguments of every implementation of causal Flow-Attention."""

    q: Tensor  # (B, H, n, d)
    k: Tensor  # (B, H, n, d)
    v: Tensor  # (B, H, n, e)
    padding: Tensor | None  # bool (B, n), True = padding
    options: FlowOptions
    chunk_size: int  # C; a shorter input is one chunk of its own length
    state: State | None  # after the earlier tokens


class Scores(NamedTuple):
    """P = q kᵀ inside of each chunk, (B, H, G, C, C), split into its causal halves."""

    to_sinks: Tensor  # the lower triangle: sink i, source j <= i
    to_sources: Tensor  # the upper triangle: sink i, source j >= i


class ChunkFlow(NamedTuple):
    """Weights of the tokens by the flows of Algorithm 2, (B, H, G, C) each."""

    competition: Tensor  # weight of every source
    allocation: Tensor  # weight of every sink
    scale: Tensor  # of the sum in the last line of Algorithm 2: allocation / I, with I not divided by c


#: The sums of a state, in the order of the arguments and results of functions with a hand-written backward pass.
STATE_SUMS = (
    "sum_k",
    "sum_q",
    "sum_k_over_outgoing",
    "sum_q_over_incoming",
    "log_competition",
    "log_allocation",
    "sum_kv",
)


def state_shapes(q: Tensor, v: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state: ``count`` and STATE_SUMS."""
    batch, heads, _, d = q.shape
    vector, number = (batch, heads, d), (batch, heads)
    return {
        "count": (batch,),
        "sum_k": vector,
        "sum_q": vector,
        "sum_k_over_outgoing": vector,
        "sum_q_over_incoming": vector,
        "log_competition": number,
        "log_allocation": number,
        "sum_kv": (batch, heads, d, v.shape[3]),
    }


def empty_state(q: Tensor, v: Tensor) -> State:
    """The state before the first token."""
    state = zero_state(state_shapes(q, v), compute_dtype(q), q.device)
    for name in ("log_competition", "log_allocation"):
        state[name].fill_(excluded_logit())
    return state


def attention_in_chunks(inputs: CausalInputs) -> tuple[Tensor, State]:
    """Algorithm 2: the output (B, H, n, e) and the state after the tokens.

    O(n (C d + d e)) time, O(n (C + d + e) + (n / C) d e) memory.
    """
    q, k, v, padding, options, chunk_size, initial_state = inputs
    length, size = q.shape[2], chunk_length(chunk_size, q.shape[2])
    positions = chunk_positions(q, padding, size, initial_state)
    features = chunk_features(q, k, options.phi, padding, size)
    scores = chunk_scores(features)
    flow, state = causal_flow(features, scores, positions, options, initial_state)
    (q, k), to_sinks = features.unbind(), scores.to_sinks
    del scores  # frees the upper triangle before more is allocated
    # Contiguous, since products of many small matrices would copy other layouts each time.
    v = (chunk_values(v, padding, size) * flow.competition.unsqueeze(-1)).contiguous()
    initial_kv = None if initial_state is None else initial_state["sum_kv"]
    earlier, state["sum_kv"] = carry_sums(k.transpose(-2, -1) @ v, initial_kv)
    # (B, H, G, ...) -> (B H G, ...), so that one product is added to the other as it is formed
    total, to_sinks, values = (x.flatten(0, 2) for x in (q @ earlier, to_sinks, v))
    total = total.baddbmm_(to_sinks, values).view_as(v)
    return joined(total, length) * joined(flow.scale, length).unsqueeze(-1), state


def chunk_positions(q: Tensor, padding: Tensor | None, size: int, state: State | None) -> Positions:
    """Positions of the tokens of q (B, H, n, d) in chunks of ``size``, counted on from those of ``state``."""
    earlier = None if state is None else state["count"]
    batch, length = q.shape[0], q.shape[2]
    if padding is None and earlier is None:  # in two operations, since short inputs are bound by launches
        count = torch.arange(1, length + 1, device=q.device, dtype=compute_dtype(q)).unsqueeze(0)
        total = torch.full((batch,), length, device=q.device)
    else:
        count = torch.arange(1, length + 1, device=q.device) if padding is None else (~padding).cumsum(1)
        count = count.expand(batch, length)
        count = count if earlier is None else count + earlier[:, None]
        total = count[:, -1].clone()
    excluded = None
    counts = split_chunks(count[:, None], size)  # (B or 1, 1, G, C)
    if padding is not None or counts.shape[2] * size > length:
        excluded = torch.zeros(1, length, dtype=torch.bool, device=q.device) if padding is None else padding
        excluded = ~split_chunks(~excluded[:, None], size)  # also excludes the tokens that split_chunks appends
    counts = counts if padding is None and excluded is None else counts.clamp(min=1)
    return Positions(counts.to(compute_dtype(q)), excluded, total)


def chunk_features(q: Tensor, k: Tensor, phi: str, padding: Tensor | None, size: int) -> Tensor:
    """phi(q) and phi(k), zero at padding, in chunks: (B, H, n, d) -> (2, B, H, G, C, d)."""
    both = torch.stack([x.to(compute_dtype(x)) for x in (q, k)])  # (2, B, H, n, d)
    features = real_features(both, phi, padding).flatten(0, 1)
    return split_chunks(features, size).unflatten(0, (2, q.shape[0]))


def chunk_values(v: Tensor, padding: Tensor | None, size: int) -> Tensor:
    """v, zero at padding, in chunks: (B, H, n, e) -> (B, H, G, C, e)."""
    return split_chunks(zero_padding(v.to(compute_dtype(v)), padding), size)


def chunk_scores(features: Tensor) -> Scores:
    """P = q kᵀ of the features (2, B, H, G, C, d); O(n C d)."""
    q, k = features.unbind()
    lower = torch.ones(q.shape[3], q.shape[3], dtype=q.dtype, device=q.device).tril()
    scores = q @ k.transpose(-2, -1)
    to_sources = scores * lower.T
    return Scores(scores.mul_(lower), to_sources)


def causal_flow(
    features: Tensor, scores: Scores, positions: Positions, options: FlowOptions, initial_state: State | None
) -> tuple[ChunkFlow, State]:
    """Algorithm 2 without its last line, from the features (2, B, H, G, C, d); the state lacks ``sum_kv``."""
    to_sinks, to_sources = scores
    totals = features.sum(-1)
    carried, sums = carry_sides(features.sum(-2), side_sums(initial_state, "sum_q", "sum_k"))
    inside = torch.stack([to_sinks.sum(-1), to_sources.sum(-2)])
    flow = replace_zero_by_one(_received(inside, features, totals, carried, options.form))
    inverse_flow = positions.count / flow  # I and O are means over c, so their reciprocals have c
    initial_inverse = side_sums(initial_state, "sum_q_over_incoming", "sum_k_over_outgoing")
    carried_inverse, sums_inverse = carry_sides(row_times(inverse_flow, features), initial_inverse)
    inside = torch.stack([times_column(to_sinks, inverse_flow[1]), row_times(inverse_flow[0], to_sources)])
    conserved_flow = _received(inside, features, totals * inverse_flow, carried_inverse, options.form)
    competition, allocation, logs = flow_weights(*conserved_flow.unbind(), positions, options, initial_state)
    result = ChunkFlow(competition, allocation, allocation / flow[0])
    # Clones, because callers may change the tensors of a state in place: they must share no memory.
    (sum_q, sum_k), (sum_q_in, sum_k_out) = ([x.clone() for x in pair.unbind()] for pair in (sums, sums_inverse))
    sums = {"sum_k": sum_k, "sum_q": sum_q, "sum_k_over_outgoing": sum_k_out, "sum_q_over_incoming": sum_q_in}
    return result, {"count": positions.total, **sums, **logs}


def side_sums(state: State | None, of_sinks: str, of_sources: str) -> Tensor | None:
    """Two sums of a state as (2, B, H, d); None for zeros."""
    return torch.stack([state[of_sinks], state[of_sources]]) if state else None


def carry_sides(chunk_sums: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """``carry_sums`` of both sides: before each chunk (2, B, H, G, d), and over all chunks (2, B, H, d)."""
    initial = None if initial is None else initial.flatten(0, 1)
    return tuple(x.unflatten(0, chunk_sums.shape[:2]) for x in carry_sums(chunk_sums.flatten(0, 1), initial))


def joined(chunks: Tensor, length: int) -> Tensor:
    """(B, H, G, C, ...) -> (B, H, n, ...), without the filling of the last chunk."""
    return chunks.flatten(2, 3)[:, :, :length]


def row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """row (..., a) times matrix (..., a, b) -> (..., b)."""
    product = torch.bmm(row.flatten(0, -2).unsqueeze(1), matrix.flatten(0, -3))  # fewer internal calls than matmul
    return product.view(*row.shape[:-1], matrix.shape[-1])


def times_column(matrix: Tensor, column: Tensor) -> Tensor:
    """matrix (..., a, b) times column (..., b) -> (..., a), computed as a row, in a sixth of the time on a CPU."""
    return row_times(column, matrix.transpose(-2, -1))


def _received(inside: Tensor, receivers: Tensor, giver_totals: Tensor, carried: Tensor, form: FlowForm) -> Tensor:
    """The flow into receivers (2, B, H, G, C, d) from the other side up to their own position, (2, B, H, G, C).

    ``inside`` (2, B, H, G, C) is the part from their own chunk, without the form's eps; ``giver_totals``, of the same
    shape, is each giver's sum over d; ``carried`` (2, B, H, G, d) holds the givers' sums over earlier chunks.
    """
    carried = carried.flip(0) + form.eps
    received = inside + times_column(receivers, carried)
    if form.eps:
        total = giver_totals.flip(0).cumsum(-1) + carried.sum(-1, keepdim=True)
        received = torch.add(received, total, alpha=form.eps)
    return received + form.outer_eps if form.outer_eps else received
