"""Flow-Attention: attention as a flow network with conserved capacities, linear in the sequence length.

Wu, Wu, Xu, Wang, Long, *Flowformer: Linearizing Transformers with Conservation Flows*, ICML 2022, equations 4-8,
Algorithm 1 (not causal) and Algorithm 2 (causal). Legend, used throughout: B batch, H heads, n sinks (queries),
m sources (keys), d channels of q and k, e channels of v, C chunk length, G = ceil(n / C) chunks.
"""

import itertools
import math
from typing import Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from .checks import State, check_choice, check_padding_mask, check_positive_int, check_query_key_value, check_state
from .chunks import autocast_off, carry_sums, compute_dtype, split_chunks, zero_padding
from .feature_maps import FEATURE_MAPS, real_features

COMPETITIONS = ("softmax", "sigmoid", "none")
ALLOCATIONS = ("sigmoid", "softmax", "none")


class FlowForm(NamedTuple):
    """The constants in which the paper and the authors' released modules differ."""

    eps: float  # added to q, k and their sums inside every flow
    outer_eps: float  # added to every flow as a whole
    rescale: bool  # softmax over m sources times m, incoming flow times n / m, outgoing flow clamped


FORMS: Dict[str, FlowForm] = {
    # Algorithms 1 and 2 to the letter.
    "paper": FlowForm(eps=0.0, outer_eps=0.0, rescale=False),
    # The authors' Flow_Attention.py and their fairseq module.
    "released": FlowForm(eps=1e-6, outer_eps=0.0, rescale=True),
    # The authors' image model.
    "released_vision": FlowForm(eps=1e-6, outer_eps=1e-6, rescale=True),
}

# A logit no softmax over real tokens ever sees; finite, because -inf makes a row of nothing but padding NaN.
_EXCLUDED = -1e30
# Clamps up to here keep exp and its sum over any sequence inside float32; beyond, sums are kept as logarithms.
_EXP_BOUND = 30.0
# Tokens that go through the causal form at once on a CPU; of 512, 1024 and 2048 the fastest at 16,384 tokens.
_CPU_PIECE = 1024


class FlowOptions(NamedTuple):
    """Everything that shapes the mechanism apart from its tensors; see ``flow_attention``."""

    form: FlowForm
    clamp: float
    phi: str
    competition: str
    allocation: str


class _Flow(NamedTuple):
    """The quantities every output is made of; sinks and sources are laid out as in the form that made them."""

    q: Tensor  # features of the sinks, zero at padding
    k: Tensor  # features of the sources, zero at padding
    incoming: Tensor  # I, not divided by any count
    competition: Tensor  # weight of every source
    allocation: Tensor  # weight of every sink


def flow_options(
    form: str = "released",
    clamp: Optional[float] = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
) -> FlowOptions:
    """Check the options of ``flow_attention`` and put them into one tuple; raises ValueError naming the wrong one."""
    check_choice("form", form, tuple(FORMS))
    check_choice("phi", phi, FEATURE_MAPS)
    check_choice("competition", competition, COMPETITIONS)
    check_choice("allocation", allocation, ALLOCATIONS)
    if clamp is not None and not (isinstance(clamp, (int, float)) and clamp > 0.0):
        raise ValueError(f"clamp is {clamp!r}; allowed: a number above 0, or None (or inf) for no clamp")
    unclamped = clamp is None or not FORMS[form].rescale
    return FlowOptions(FORMS[form], math.inf if unclamped else float(clamp), phi, competition, allocation)


def flow_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Optional[Tensor] = None,
    query_padding_mask: Optional[Tensor] = None,
    form: str = "released",
    clamp: Optional[float] = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
    chunk_size: int = 64,
    initial_state: Optional[State] = None,
    return_state: bool = False,
) -> Union[Tensor, Tuple[Tensor, State]]:
    """Flow-Attention of q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e), in v's dtype.

    Incoming flow I_i = phi(q_i)·Σ_j phi(k_j) and outgoing flow O_j = phi(k_j)·Σ_i phi(q_i) (Eq. 4-5), conserved
    Î_i = phi(q_i)·Σ_j phi(k_j)/O_j and Ô_j = phi(k_j)·Σ_i phi(q_i)/I_i (Eq. 6-7), then
    R_i = sigmoid(Î_i) · phi(q_i)/I_i · Σ_j phi(k_j)ᵀ softmax(Ô)_j v_j (Eq. 8). Causal (Algorithm 2), every sum
    runs over j <= i and is divided by the number of real tokens up to i.

    Masks: bool, ``key_padding_mask`` (B, m), ``query_padding_mask`` (B, n), True = padding. Padding on either side
    never changes a real token's output and its own output is 0, all-padding rows included; in self-attention pass
    the same mask for both. Causal, a token is padding when either mask says so.

    Args:
        form: "paper" is Algorithms 1 and 2 to the letter; "released" adds the authors' 1e-6 to q, k and the sums,
            multiplies the softmax by m and Î by n/m; "released_vision" adds 1e-6 to every flow as well.
        clamp: bound on the size of Ô in the released forms; "paper" has none and ignores it. Part of the trained model:
            1 in the authors' core module and image model, 5 in their fairseq language model, 10 in their RL model,
            none (None or inf) in their long-range-arena code.
        phi: "sigmoid", "elu+1" or "relu" (plus 1e-6) (Table 10).
        competition: "softmax" over the sources, "sigmoid" or "none" (Table 11). (The authors' long-range-arena
            code takes its softmax over heads; that is not offered.)
        allocation: "sigmoid", "softmax" over the sinks or "none" (Table 11); the softmax is multiplied by the
            number of sinks where the competition is by the number of sources.
        chunk_size: C of the causal form, any length; results do not depend on it.
        initial_state: causal; the state of the tokens before these, as returned. One token, or a piece of a
            prompt, continues a sequence exactly.
        return_state: causal; also return the state after the last token: ``count`` (B,), ``sum_k``, ``sum_q``,
            ``sum_k_over_outgoing``, ``sum_q_over_incoming`` (B, H, d), ``log_competition``, ``log_allocation``
            (B, H), ``sum_kv`` (B, H, d, e). float32 and of constant size; the batch is dimension 0 of each.

    Cost: O(n d e) time; causal, O(n (C + d) + (n / C) d e) memory, nothing of size n x n. Sums and normalisers are
    float32 (float64 for float64 inputs) whatever the input, autocast included.

    Raises:
        ValueError: a shape, dtype, mask, name, clamp, chunk size or state that does not fit; a state without causal.
    """
    options = flow_options(form, clamp, phi, competition, allocation)
    _check_inputs(q, k, v, causal, key_padding_mask, query_padding_mask, chunk_size)
    if not causal and (initial_state is not None or return_state):
        raise ValueError("initial_state and return_state are given with causal=False; allowed: only with causal=True")
    with autocast_off(q):
        if not causal:
            return flow_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, options)
        check_state(initial_state, _state_shapes(q, v), compute_dtype(q), q)
        padding = _either(key_padding_mask, query_padding_mask)
        out, state = _causal_attention(q, k, v, padding, options, chunk_size, initial_state)
    out = out.to(v.dtype)
    return (out, state) if return_state else out


def flow_attention_scriptable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Optional[Tensor],
    query_padding_mask: Optional[Tensor],
    options: FlowOptions,
) -> Tensor:
    """``flow_attention`` with ``causal=False`` for callers inside TorchScript, which has no union of result types.

    Arguments are not checked; shapes, masks, cost as in ``flow_attention``.
    """
    dtype = compute_dtype(q)
    flow = _full_flow(q.to(dtype), k.to(dtype), key_padding_mask, query_padding_mask, options)
    return _aggregate(flow, zero_padding(v.to(dtype), key_padding_mask)).to(v.dtype)


def flow_attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Optional[Tensor] = None,
    query_padding_mask: Optional[Tensor] = None,
    form: str = "released",
    clamp: Optional[float] = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
    chunk_size: int = 64,
) -> Tuple[Tensor, Tensor]:
    """The competition weight of every source (B, H, m) and allocation weight of every sink (B, H, n) (Figures 4-9).

    Exactly what ``flow_attention`` with the same arguments multiplies the values and the result with, so the
    released softmax competition is around 1, not around 1/m. 0 at padding. Cost and errors as there.
    """
    options = flow_options(form, clamp, phi, competition, allocation)
    _check_inputs(q, k, k, causal, key_padding_mask, query_padding_mask, chunk_size)
    with autocast_off(q):
        dtype = compute_dtype(q)
        if not causal:
            flow = _full_flow(q.to(dtype), k.to(dtype), key_padding_mask, query_padding_mask, options)
            sources, sinks = flow.competition, flow.allocation
        else:
            key_padding_mask = query_padding_mask = _either(key_padding_mask, query_padding_mask)
            flow, _, _ = _causal_flow(q.to(dtype), k.to(dtype), key_padding_mask, options, chunk_size, None)
            # (B, H, G, C) -> (B, H, n)
            sources, sinks = (w.flatten(2)[:, :, : q.shape[2]] for w in (flow.competition, flow.allocation))
    if key_padding_mask is not None:
        sources = sources.masked_fill(key_padding_mask[:, None], 0.0)
    if query_padding_mask is not None:
        sinks = sinks.masked_fill(query_padding_mask[:, None], 0.0)
    return sources, sinks


def flow_attention_map(q: Tensor, k: Tensor, *, causal: bool = False, max_tokens: int = 4096, **options) -> Tensor:
    """The attention map (B, H, n, m) that Flow-Attention never forms: ``map @ v`` is its output.

    For looking at short inputs: O(n m) memory, ``options`` and errors as in ``flow_attention``.

    Raises:
        ValueError: also for more than ``max_tokens`` sinks or sources.
    """
    check_query_key_value(q, k, k, causal)
    n, m, dtype = q.shape[2], k.shape[2], compute_dtype(q)
    if max(n, m) > max_tokens:
        raise ValueError(f"q and k have {n} and {m} tokens; allowed: at most max_tokens={max_tokens} each")
    # One-hot values carry each source's share through unmixed.
    identity = torch.eye(m, dtype=dtype, device=k.device).expand(*k.shape[:2], m, m)
    return flow_attention(q.to(dtype), k.to(dtype), identity, causal=causal, **options)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_padding_mask: Optional[Tensor],
    query_padding_mask: Optional[Tensor],
    chunk_size: int,
) -> None:
    check_query_key_value(q, k, v, causal)
    check_padding_mask("key_padding_mask", key_padding_mask, k)
    check_padding_mask("query_padding_mask", query_padding_mask, q)
    check_positive_int("chunk_size", chunk_size)


def _either(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """Padding by either mask; a causal token is source and sink at once."""
    if a is None or b is None or a is b:
        return a if b is None else b
    return a | b


def _dot(x: Tensor, vector: Tensor) -> Tensor:
    """x (..., n, d) · vector (..., d) -> (..., n)."""
    if torch.jit.is_scripting():
        # Autocast cannot be switched off inside TorchScript; unlike a product, a sum stays float32 under it.
        return (x * vector.unsqueeze(-2)).sum(-1)
    return (x @ vector.unsqueeze(-1)).squeeze(-1)


def _positive(flow: Tensor) -> Tensor:
    """``flow`` with 1 where nothing flows (padding, features that underflow): 1/flow would turn a 0 into NaN."""
    return flow.masked_fill(flow < 1e-18, 1.0)


def _bounded(outgoing: Tensor, clamp: float) -> Tensor:
    # Not isinf: torch.compile, which may make a symbol of a number, does not trace it.
    return outgoing.clamp(-clamp, clamp) if clamp < math.inf else outgoing


# --- not causal: Algorithm 1 -------------------------------------------------------------------------------------


def _count(x: Tensor, padding_mask: Optional[Tensor]) -> Tensor:
    """Real tokens of each row, at least 1, (B or 1, 1, 1), for x (B, H, tokens, d)."""
    if padding_mask is None:
        return torch.full([1, 1, 1], x.shape[2], dtype=x.dtype, device=x.device)
    return (~padding_mask).sum(1).clamp(min=1).to(x.dtype)[:, None, None]


def _received(receivers: Tensor, givers: Tensor, weights: Optional[Tensor], form: FlowForm) -> Tensor:
    """What each receiver (B, H, r, d) gets from all givers (B, H, g, d), weighted (B, H, g): (B, H, r)."""
    if weights is None:
        given = givers.sum(2)
    else:
        given = _dot(givers.transpose(-2, -1), weights)  # (B, H, d)
    given = given + form.eps
    # (receivers + eps)·given without a second (r, d) tensor
    return _dot(receivers, given) + form.eps * given.sum(-1, keepdim=True) + form.outer_eps


def _full_flow(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Optional[Tensor],
    query_padding_mask: Optional[Tensor],
    options: FlowOptions,
) -> _Flow:
    """Equations 4-7 over all sinks and sources; q (B, H, n, d), k (B, H, m, d)."""
    form = options.form
    q = real_features(q, options.phi, query_padding_mask)
    k = real_features(k, options.phi, key_padding_mask)
    sinks, sources = _count(q, query_padding_mask), _count(k, key_padding_mask)
    incoming = _positive(_received(q, k, None, form))  # I (B, H, n)
    outgoing = _positive(_received(k, q, None, form))  # O (B, H, m)
    conserved_incoming = _received(q, k, 1.0 / outgoing, form)  # Î (B, H, n)
    conserved_outgoing = _bounded(_received(k, q, 1.0 / incoming, form), options.clamp)  # Ô (B, H, m)
    if form.rescale:
        conserved_incoming = conserved_incoming * (sinks / sources)
    return _Flow(
        q,
        k,
        incoming,
        _weight(conserved_outgoing, options.competition, key_padding_mask, sources if form.rescale else None),
        _weight(conserved_incoming, options.allocation, query_padding_mask, sinks if form.rescale else None),
    )


def _weight(flow: Tensor, kind: str, padding_mask: Optional[Tensor], scale: Optional[Tensor]) -> Tensor:
    """Competition or allocation weights from a conserved flow, (B, H, tokens) -> (B, H, tokens)."""
    if kind == "none":
        return torch.ones_like(flow)
    if kind == "sigmoid":
        return torch.sigmoid(flow)
    if padding_mask is not None:
        flow = flow.masked_fill(padding_mask[:, None], -1e30)  # finite: -inf makes a row of padding NaN
    weights = torch.softmax(flow, dim=-1)
    return weights if scale is None else weights * scale


def _aggregate(flow: _Flow, v: Tensor) -> Tensor:
    """Equation 8: (B, H, n, e) from v (B, H, m, e)."""
    context = flow.k.transpose(-2, -1) @ (v * flow.competition.unsqueeze(-1))  # (B, H, d, e)
    return (flow.q @ context) * (flow.allocation / flow.incoming).unsqueeze(-1)


# --- causal: Algorithm 2, its exact chunk form -------------------------------------------------------------------
#
# With P = q kᵀ inside a chunk, L = tril(P), and x̄ the sum of x over all earlier chunks, every running sum of
# Algorithm 2 splits into a part inside the chunk and a carried part, for example
# I = rowsum(L) + q·k̄ and Î = L (1/O) + q·(k/O)‾. One C x C product serves all five.


def _state_shapes(q: Tensor, v: Tensor) -> Dict[str, Tuple[int, ...]]:
    batch, heads, _, d = q.shape
    vectors = ("sum_k", "sum_q", "sum_k_over_outgoing", "sum_q_over_incoming")
    return {
        "count": (batch,),
        **{name: (batch, heads, d) for name in vectors},
        "log_competition": (batch, heads),
        "log_allocation": (batch, heads),
        "sum_kv": (batch, heads, d, v.shape[3]),
    }


def _causal_attention(
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
        flow, scores, state = _causal_flow(*features, padding_piece, options, chunk_size, earlier)
        values = zero_padding(v_piece.to(dtype), padding_piece)
        out, state["sum_kv"] = _aggregate_chunks(flow, scores, values, earlier)
        outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def _causal_flow(
    q: Tensor,
    k: Tensor,
    padding: Optional[Tensor],
    options: FlowOptions,
    chunk_size: int,
    initial: Optional[State],
) -> Tuple[_Flow, Tensor, State]:
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
    incoming, outgoing = _positive(incoming), _positive(outgoing)
    # I and O are means over the count, so their reciprocals carry it; Î and Ô are means again.
    conserved_incoming, sum_k_out = _received_so_far(
        to_sinks, q, k, count / outgoing, start.get("sum_k_over_outgoing"), form
    )
    conserved_outgoing, sum_q_in = _received_so_far(
        to_sources, k, q, count / incoming, start.get("sum_q_over_incoming"), form
    )
    competition, log_competition = _weight_so_far(
        _bounded(conserved_outgoing / count, options.clamp), options.competition,
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
    return _Flow(q, k, incoming, competition, allocation), to_sinks, state


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
    received = _dot(scores, weights) + _dot(receivers, carried) + form.outer_eps
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
        log_so_far = _positive(total).log().masked_fill(total == 0.0, _EXCLUDED)
        weights = exponentials / _positive(so_far)
    else:
        logs = torch.cat([before, flow], dim=-1).logcumsumexp(-1)[..., 1:]
        weights, log_so_far = (flow - logs).exp(), logs[..., -1]
    return weights.view(shape) * count, log_so_far


def _aggregate_chunks(flow: _Flow, scores: Tensor, v: Tensor, initial: Optional[State]) -> Tuple[Tensor, Tensor]:
    """The last line of Algorithm 2: v (B, H, n, e) -> (B, H, n, e), and Σ kᵀ(w v) over all tokens (B, H, d, e)."""
    length = v.shape[2]
    v = split_chunks(v, scores.shape[-1]) * flow.competition.unsqueeze(-1)  # (B, H, G, C, e)
    earlier, total = carry_sums(flow.k.transpose(-2, -1) @ v, None if initial is None else initial["sum_kv"])
    out = (scores @ v + flow.q @ earlier) * (flow.allocation / flow.incoming).unsqueeze(-1)
    return out.flatten(2, 3)[:, :, :length], total  # (B, H, G, C, e) -> (B, H, n, e)
