"""Causal Flow-Attention: Flowformer (ICML 2022), Algorithm 2 in an exact chunk form.

Legend: ``flow_attention``.

With P = q kᵀ inside a chunk, L = tril(P), and x̄ the sum of x over all earlier chunks, every running sum of
Algorithm 2 splits into a part inside the chunk and a carried part, for example
I = rowsum(L) + q·k̄ and Î = L (1/O) + q·(k/O)‾. One C x C product serves all five.
"""

import itertools
import math
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

from .checks import State
from .chunks import carry_sums, compute_dtype, split_chunks, zero_padding
from .feature_maps import real_features
from .flow_options import Flow, FlowForm, FlowOptions, bounded, dot, positive
from .triton import dispatch

# A logit no softmax over real tokens ever sees; finite, because -inf makes a row of nothing but padding NaN.
_EXCLUDED = -1e30
# Clamps up to here keep exp and its sum over any sequence inside float32; beyond, sums are kept as logarithms.
_EXP_BOUND = 30.0
# Tokens that go through the causal form at once on a CPU; of 512, 1024 and 2048 the fastest at 16,384 tokens.
_CPU_PIECE = 1024


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


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Optional[Tensor],
    options: FlowOptions,
    chunk_size: int,
    state: Optional[State],
) -> Tuple[Tensor, State]:
    """Algorithm 2, q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) and the state after them, by kernels on a GPU."""
    given = (q, k, v, padding, options, chunk_size, state)
    if dispatch.flow_attention_applies(q, k, v):
        return dispatch.attempt("flow_attention", "causal_attention", chunked_causal_attention, given)
    return chunked_causal_attention(*given)


def chunked_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Optional[Tensor],
    options: FlowOptions,
    chunk_size: int,
    state: Optional[State],
) -> Tuple[Tensor, State]:
    """Algorithm 2, q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) and the state after them.

    On a CPU the sequence goes through in pieces whose temporaries stay in the caches. Elsewhere, and in a compiled
    graph, which would repeat itself for every piece, it goes as a whole.
    """
    length, dtype = q.shape[2], compute_dtype(q)
    whole = q.device.type != "cpu" or torch.compiler.is_compiling() or length <= _CPU_PIECE
    piece = length if whole else max(_CPU_PIECE // chunk_size, 1) * chunk_size
    outputs = []
    paddings = itertools.repeat(None) if padding is None else padding.split(piece, dim=1)
    # split, not slices: the gradient of a slice is as large as what it was cut from
    for q_piece, k_piece, v_piece, padding_piece in zip(*(x.split(piece, dim=2) for x in (q, k, v)), paddings):
        earlier = state
        features = q_piece.to(dtype), k_piece.to(dtype)
        flow, scores, state = causal_flow(*features, padding_piece, options, chunk_size, earlier)
        values = zero_padding(v_piece.to(dtype), padding_piece)
        out, state["sum_kv"] = _aggregate_chunks(flow, scores, values, earlier)
        outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def causal_flow(
    q: Tensor,
    k: Tensor,
    padding: Optional[Tensor],
    options: FlowOptions,
    chunk_size: int,
    initial: Optional[State],
) -> Tuple[Flow, Tensor, State]:
    """Algorithm 2 but for its last line, in chunks: q, k (B, H, n, d) -> q, k (B, H, G, C, d), weights (B, H, G, C).

    Also L (B, H, G, C, C), and the state, which lacks ``sum_kv``: that belongs to the values.
    """
    form, size = options.form, min(chunk_size, q.shape[2])
    start = {} if initial is None else initial
    excluded, count, total = _causal_counts(q, padding, size, start.get("count"))
    q = split_chunks(real_features(q, options.phi, padding), size)  # (B, H, G, C, d)
    k = split_chunks(real_features(k, options.phi, padding), size)
    scores = q @ k.transpose(-2, -1)  # P (B, H, G, C, C)
    to_sinks = scores.tril()  # sink i, source j <= i
    to_sources = scores.triu().transpose(-2, -1)  # source j, sink i <= j
    ones = torch.ones_like(q[..., 0])  # (B, H, G, C)
    incoming, sum_k = _received_so_far(to_sinks, q, k, ones, start.get("sum_k"), form)
    outgoing, sum_q = _received_so_far(to_sources, k, q, ones, start.get("sum_q"), form)
    incoming, outgoing = positive(incoming), positive(outgoing)
    # I and O are means over the count, so their reciprocals carry it; Î and Ô are means again.
    conserved_incoming, sum_k_out = _received_so_far(
        to_sinks, q, k, count / outgoing, start.get("sum_k_over_outgoing"), form
    )
    conserved_outgoing, sum_q_in = _received_so_far(
        to_sources, k, q, count / incoming, start.get("sum_q_over_incoming"), form
    )
    competition, log_competition = _weight_so_far(
        bounded(conserved_outgoing / count, options.clamp), options.competition,
        count, excluded, start.get("log_competition"), options.clamp,
    )  # fmt: skip
    allocation, log_allocation = _weight_so_far(
        conserved_incoming / count, options.allocation, count, excluded, start.get("log_allocation"), math.inf
    )
    state = {
        "count": total,
        "sum_k": sum_k,
        "sum_q": sum_q,
        "sum_k_over_outgoing": sum_k_out,
        "sum_q_over_incoming": sum_q_in,
        "log_competition": log_competition,
        "log_allocation": log_allocation,
    }
    return Flow(q, k, incoming, competition, allocation), to_sinks, state


def _causal_counts(
    q: Tensor, padding: Optional[Tensor], size: int, earlier: Optional[Tensor]
) -> Tuple[Optional[Tensor], Tensor, Tensor]:
    """Tokens to leave out, bool (B, 1, G, C) or None; c, the real tokens so far (B or 1, 1, G, C); their total (B,)."""
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
    count = split_chunks(count[:, None], size).clamp(min=1).to(q.dtype)
    return excluded, count, total


def _received_so_far(
    scores: Tensor, receivers: Tensor, givers: Tensor, weights: Tensor, earlier: Optional[Tensor], form: FlowForm
) -> Tuple[Tensor, Tensor]:
    """What each receiver gets from the givers up to its own position, weighted, and Σ weight·giver over all.

    scores (B, H, G, C, C) lower triangular, receivers and givers (B, H, G, C, d), weights (B, H, G, C), earlier
    (B, H, d) -> (B, H, G, C) and (B, H, d).
    """
    carried, total = carry_sums((weights.unsqueeze(-2) @ givers).squeeze(-2), earlier)  # (B, H, G, d), (B, H, d)
    carried = carried + form.eps
    received = dot(scores, weights) + dot(receivers, carried) + form.outer_eps
    if form.eps:
        given = (givers.sum(-1) * weights).cumsum(-1) + carried.sum(-1, keepdim=True)
        received = received + form.eps * given
    return received, total


def _weight_so_far(
    flow: Tensor, kind: str, count: Tensor, excluded: Optional[Tensor], earlier: Optional[Tensor], bound: float
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
    if excluded is not None:
        flow = flow.masked_fill(excluded, _EXCLUDED)
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
    return weights.view(shape) * count, log_so_far


def _aggregate_chunks(flow: Flow, scores: Tensor, v: Tensor, initial: Optional[State]) -> Tuple[Tensor, Tensor]:
    """The last line of Algorithm 2: v (B, H, n, e) -> (B, H, n, e), and Σ kᵀ(w v) over all tokens (B, H, d, e)."""
    length = v.shape[2]
    v = split_chunks(v, scores.shape[-1]) * flow.competition.unsqueeze(-1)  # (B, H, G, C, e)
    earlier, total = carry_sums(flow.k.transpose(-2, -1) @ v, None if initial is None else initial["sum_kv"])
    out = (scores @ v + flow.q @ earlier) * (flow.allocation / flow.incoming).unsqueeze(-1)
    return out.flatten(2, 3)[:, :, :length], total  # (B, H, G, C, e) -> (B, H, n, e)
