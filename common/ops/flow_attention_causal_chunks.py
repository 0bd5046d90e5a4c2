"""Causal Flow-Attention in chunks: Flowformer (ICML 2022), Algorithm 2, exactly. Legend: ``flow_attention``.

With P = q kᵀ inside a chunk, L = tril(P), U = triu(P), and x̄ the sum of x over all earlier chunks, every running sum of
Algorithm 2 splits into a part inside the chunk and a carried part, for example
I = rowsum(L) + q·k̄, O = columnsum(U) + k·q̄ and Î = L (1/O) + q·(k/O)‾. One C x C product serves all five.
"""

import math
from typing import Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .checks import State
from .chunks import carry_sums, compute_dtype, split_chunks, zero_padding
from .feature_maps import real_features
from .flow_options import FlowForm, FlowOptions, bounded, positive

# A logit no softmax over real tokens ever sees; finite, because -inf makes a row of nothing but padding NaN.
_EXCLUDED = -1e30
# Clamps up to here keep exp and its sum over any sequence inside float32; beyond, sums are kept as logarithms.
_EXP_BOUND = 30.0


class Positions(NamedTuple):
    """Where the tokens of some chunks stand in their sequence."""

    count: Tensor  # c, the real tokens up to each one (B or 1, 1, G, C)
    excluded: Optional[Tensor]  # which to leave out, bool (B or 1, 1, G, C)
    total: Tensor  # real tokens up to the last one (B,)


class Carried(NamedTuple):
    """Sums over all earlier chunks, one of each for every chunk, (B, H, G, d)."""

    k: Tensor
    q: Tensor
    k_over_outgoing: Tensor
    q_over_incoming: Tensor


class ChunkFlow(NamedTuple):
    """Algorithm 2 but for its last line, (B, H, G, C) where not said otherwise."""

    q: Tensor  # features of the sinks (B, H, G, C, d), zero at padding
    k: Tensor  # features of the sources (B, H, G, C, d), zero at padding
    to_sinks: Tensor  # L (B, H, G, C, C), sink i, source j <= i
    to_sources: Tensor  # U (B, H, G, C, C), sink i, source j >= i
    q_total: Tensor  # each sink's sum over d
    k_total: Tensor  # each source's
    carried: Carried
    incoming: Tensor  # I, and the other three, not divided by any count
    outgoing: Tensor  # O
    conserved_incoming: Tensor  # Î
    conserved_outgoing: Tensor  # Ô
    over_incoming: Tensor  # c / I, by which Ô weighs the sinks
    over_outgoing: Tensor  # c / O, by which Î weighs the sources
    competition: Tensor  # weight of every source
    allocation: Tensor  # weight of every sink


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


def attention_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Optional[Tensor],
    options: FlowOptions,
    chunk_size: int,
    state: Optional[State],
) -> Tuple[Tensor, State]:
    """Algorithm 2, q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) and the state after them.

    O(n (C d + d e)) time, O(n (C + d + e) + (n / C) d e) memory.
    """
    length, size = q.shape[2], min(chunk_size, q.shape[2])
    positions = chunk_positions(q, padding, size, state)
    features = (chunk_features(x, options.phi, padding, size) for x in (q, k))
    flow, after = causal_flow(*features, positions, options, state)
    total, _, after["sum_kv"] = aggregate(flow, chunk_values(v, padding, size), state)
    out = total * flow_scale(flow.allocation, flow.incoming).unsqueeze(-1)
    return joined(out, length), after


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


def chunk_features(x: Tensor, phi: str, padding: Optional[Tensor], size: int) -> Tensor:
    """phi(x), zero at padding, in chunks: (B, H, n, d) -> (B, H, G, C, d)."""
    # Contiguous, since each product of many small matrices would copy others.
    return split_chunks(real_features(x.to(compute_dtype(x)), phi, padding), size).contiguous()


def chunk_values(v: Tensor, padding: Optional[Tensor], size: int) -> Tensor:
    """v, zero at padding, in chunks: (B, H, n, e) -> (B, H, G, C, e)."""
    return split_chunks(zero_padding(v.to(compute_dtype(v)), padding), size).contiguous()


def causal_flow(
    q: Tensor, k: Tensor, positions: Positions, options: FlowOptions, initial: Optional[State]
) -> Tuple[ChunkFlow, State]:
    """All of Algorithm 2 but its last line, q, k (B, H, G, C, d) being features; the state lacks ``sum_kv``."""
    form = options.form
    start: State = {} if initial is None else initial
    scores = q @ k.transpose(-2, -1)  # P (B, H, G, C, C)
    lower = torch.ones(scores.shape[-2:], dtype=q.dtype, device=q.device).tril()
    to_sinks, to_sources = scores * lower, scores * lower.T
    carried_k, sum_k = carry_sums(k.sum(3), start.get("sum_k"))  # (B, H, G, d), (B, H, d)
    carried_q, sum_q = carry_sums(q.sum(3), start.get("sum_q"))
    q_total, k_total = q.sum(-1), k.sum(-1)
    incoming = _received(to_sinks.sum(-1), q, k_total, carried_k, form)
    outgoing = _received(to_sources.sum(-2), k, q_total, carried_q, form)
    over_incoming, over_outgoing = reciprocals(incoming, outgoing, positions)
    carried_k_out, sum_k_out = carry_sums(row_times(over_outgoing, k), start.get("sum_k_over_outgoing"))
    carried_q_in, sum_q_in = carry_sums(row_times(over_incoming, q), start.get("sum_q_over_incoming"))
    inside = times_column(to_sinks, over_outgoing)
    conserved_incoming = _received(inside, q, k_total * over_outgoing, carried_k_out, form)
    inside = row_times(over_incoming, to_sources)
    conserved_outgoing = _received(inside, k, q_total * over_incoming, carried_q_in, form)
    competition, allocation, logs = flow_weights(conserved_incoming, conserved_outgoing, positions, options, start)
    flow = ChunkFlow(
        q, k, to_sinks, to_sources, q_total, k_total, Carried(carried_k, carried_q, carried_k_out, carried_q_in),
        incoming, outgoing, conserved_incoming, conserved_outgoing,
        over_incoming, over_outgoing, competition, allocation,
    )  # fmt: skip
    sums = {"sum_k": sum_k, "sum_q": sum_q, "sum_k_over_outgoing": sum_k_out, "sum_q_over_incoming": sum_q_in}
    return flow, {"count": positions.total, **sums, **logs}


def aggregate(flow: ChunkFlow, v: Tensor, initial: Optional[State]) -> Tuple[Tensor, Tensor, Tensor]:
    """The sum in the last line of Algorithm 2, of v (B, H, G, C, e): (B, H, G, C, e), not yet scaled.

    Also Σ kᵀ(w v) before each chunk (B, H, G, d, e) and over all tokens (B, H, d, e).
    """
    v = v * flow.competition.unsqueeze(-1)
    earlier, total = carry_sums(flow.k.transpose(-2, -1) @ v, None if initial is None else initial["sum_kv"])
    # (B, H, G, ...) -> (B H G, ...), so that one product is added to the other as it is formed
    carried, scores, values = (x.flatten(0, 2) for x in (flow.q @ earlier, flow.to_sinks, v))
    return carried.baddbmm_(scores, values).view_as(v), earlier, total


def flow_scale(allocation: Tensor, incoming: Tensor) -> Tensor:
    """What each row of ``aggregate`` is multiplied by."""
    return allocation / positive(incoming)


def joined(chunks: Tensor, length: int) -> Tensor:
    """(B, H, G, C, ...) -> (B, H, n, ...), without what fills the last chunk."""
    return chunks.flatten(2, 3)[:, :, :length]


def row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """row (..., a) times matrix (..., a, b) -> (..., b)."""
    return (row.unsqueeze(-2) @ matrix).squeeze(-2)


def times_column(matrix: Tensor, column: Tensor) -> Tensor:
    """matrix (..., a, b) times column (..., b) -> (..., a), as a row, for which a CPU needs a sixth of the time."""
    return row_times(column, matrix.transpose(-2, -1))


def reciprocals(incoming: Tensor, outgoing: Tensor, positions: Positions) -> Tuple[Tensor, Tensor]:
    """c / I and c / O: I and O are means over the count, so their reciprocals carry it; Î and Ô are means again."""
    return positions.count / positive(incoming), positions.count / positive(outgoing)


def flow_weights(
    conserved_incoming: Tensor, conserved_outgoing: Tensor, positions: Positions, options: FlowOptions, start: State
) -> Tuple[Tensor, Tensor, State]:
    """Competition and allocation (B, H, G, C) from Î and Ô, and the sums of their softmax up to the last token."""
    logits = bounded(conserved_outgoing / positions.count, options.clamp)
    competition, log_competition = _weight_so_far(
        logits, options.competition, positions, start.get("log_competition"), options.clamp
    )
    allocation, log_allocation = _weight_so_far(
        conserved_incoming / positions.count, options.allocation, positions, start.get("log_allocation"), math.inf
    )
    return competition, allocation, {"log_competition": log_competition, "log_allocation": log_allocation}


def _received(inside: Tensor, receivers: Tensor, given: Tensor, carried: Tensor, form: FlowForm) -> Tensor:
    """What receivers (B, H, G, C, d) get from the weighted givers up to their own position, (B, H, G, C).

    ``inside`` (B, H, G, C) is what comes from their own chunk, but for eps times ``given``, each giver's sum over d.
    """
    carried = carried + form.eps
    received = inside + times_column(receivers, carried) + form.outer_eps
    return received + form.eps * (given.cumsum(-1) + carried.sum(-1, keepdim=True)) if form.eps else received


def _weight_so_far(
    flow: Tensor, kind: str, positions: Positions, earlier: Optional[Tensor], bound: float
) -> Tuple[Tensor, Tensor]:
    """Weights (B, H, G, C) among the tokens so far, and log Σ exp(flow) over all (B, H), -1e30 where unused.

    The softmax is exp(flow_i) / Σ_{j<=i} exp(flow_j) · c_i, by logarithms where flow has no bound
    (torch's logcumsumexp has no second derivative, so neither has that).
    """
    before = flow.new_full(flow.shape[:2], _EXCLUDED) if earlier is None else earlier
    if kind == "none":
        return torch.ones_like(flow), before
    if kind == "sigmoid":
        return torch.sigmoid(flow), before
    shape = flow.shape
    if positions.excluded is not None:
        flow = flow.masked_fill(positions.excluded, _EXCLUDED)
    flow, before = flow.flatten(2), before.unsqueeze(-1)  # (B, H, G, C) -> (B, H, G C); (B, H, 1)
    if bound <= _EXP_BOUND:
        exponentials = flow.exp()
        so_far = exponentials.cumsum(-1) + before.exp()
        total = so_far[..., -1]
        # Padding alone has summed nothing yet. Not log().clamp(): the gradient of log at 0 is NaN, clamped or not.
        log_so_far = positive(total).log().masked_fill(total == 0.0, _EXCLUDED)
        weights = exponentials / positive(so_far)
    else:
        logs = torch.cat([before, flow], dim=-1).logcumsumexp(-1)[..., 1:]
        weights, log_so_far = (flow - logs).exp(), logs[..., -1]
    return weights.view(shape) * positions.count, log_so_far
