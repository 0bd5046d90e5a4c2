"""Flow-Attention of a decoder's queries to a source: competition and outgoing flow depend only on the source.

Our own addition, not in a paper. The original Flow-Attention (Flowformer, ICML 2022, equations 4-8) lets every source
divide its flow among all sinks. In a decoder the sinks are the targets, so a target would depend on later ones. Here
the sinks of the source's flows are queries of the source's own tokens, and each target reads the result.
"""

from torch import Tensor

from ..flow.full import flow_weight, full_context, full_flow, sink_flows
from ..flow.options import DEFAULTS, FlowOptions, flow_options
from ..shared.checks import check_choice, check_masks, check_query_key_value
from ..shared.feature_maps import real_features
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, state_of_source

#: How sources compete.
COMPETITIONS = ("softmax", "sigmoid", "none")
#: How each target is gated. A softmax over targets is not offered, since it would depend on later ones.
ALLOCATIONS = ("sigmoid", "none")


def flow_source_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    source_q: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    form: str = DEFAULTS.form,
    clamp: float | None = DEFAULTS.clamp,
    phi: str = DEFAULTS.phi,
    competition: str = DEFAULTS.competition,
    allocation: str = DEFAULTS.allocation,
) -> Tensor:
    """Flow-Attention of q (B, H, n, d) to a source k, source_q (B, H, m, d), v (B, H, m, e) -> (B, H, n, e).

    Over the source, with ``source_q`` s, the queries of its own tokens: I_i = phi(s_i)·Σ_j phi(k_j),
    O_j = phi(k_j)·Σ_i phi(s_i), Ô_j = phi(k_j)·Σ_i phi(s_i)/I_i, and w = softmax(Ô). Then for each target by itself
    I = phi(q)·Σ_j phi(k_j), Î = phi(q)·Σ_j phi(k_j)/O_j, and out = sigmoid(Î) · phi(q)/I · Σ_j phi(k_j)ᵀ w_j v_j.
    No target depends on another. With ``source_q`` = q this is ``flow_attention`` with ``causal=False``.

    Masks: bool, ``key_padding_mask`` (B, m) of k, v and source_q, ``query_padding_mask`` (B, n), True = padding; a
    padded query gives 0, and so does a source without real tokens. Cost: O((n + m) d e) time, O(n + m) memory. Sums
    are float32 (float64 for float64 inputs); the output has the dtype of q.

    Args:
        form, clamp, phi: as in ``flow_attention``. The released forms multiply the softmax by m; their factor for Î is
            1, since the source has as many sinks as sources.
        competition: "softmax" over the sources, "sigmoid" or "none".
        allocation: "sigmoid" or "none".

    Raises:
        ValueError: a shape, dtype, mask, name or clamp that does not fit.
    """
    options = flow_source_options(form, clamp, phi, competition, allocation)
    check_query_key_value(q, k, v, one_length=False)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    state = source_state(k, v, key_padding_mask, source_q, options)
    return attend_source(q, state, query_padding_mask, options)


def flow_source_options(form: str, clamp: float | None, phi: str, competition: str, allocation: str) -> FlowOptions:
    """Check the options of ``flow_source_attention`` and put them into one tuple; ValueError names the wrong one."""
    check_choice("competition", competition, COMPETITIONS)
    check_choice("allocation", allocation, ALLOCATIONS)
    return flow_options(form, clamp, phi, competition, allocation)


def source_state(
    k: Tensor, v: Tensor, key_padding_mask: Tensor | None, source_q: Tensor, options: FlowOptions
) -> State:
    """State of a source: sums over its tokens, of a size that does not depend on m; O(m d e).

    ``sum_k`` and ``sum_k_over_outgoing`` (B, H, d), with the form's epsilon added, and ``sum_kv`` (B, H, d, e) of the
    values times their competition, float32. Shapes and mask as in ``flow_source_attention``. Only ``source_q`` is
    checked; one that does not fit k raises a ValueError.
    """
    check_query_key_value(source_q, k, v, one_length=True, names=("source_q", "k", "v"))
    dtype = compute_dtype(k)
    with autocast_off(k):
        source = full_flow(source_q.to(dtype), k.to(dtype), key_padding_mask, key_padding_mask, options)
        sum_kv = full_context(source, zero_padding(v.to(dtype), key_padding_mask))
    return {"sum_k": source.sum_k, "sum_k_over_outgoing": source.sum_k_over_outgoing, "sum_kv": sum_kv}


def attend_source(q: Tensor, state: State, query_padding_mask: Tensor | None, options: FlowOptions) -> Tensor:
    """Attend from q (B, H, n, d) to the source of ``state`` -> (B, H, n, e) in q's dtype; O(n d e).

    Padded queries, by ``query_padding_mask`` (B, n; True = padding), give 0. Only ``state`` is checked; one that does
    not fit raises a ValueError.
    """
    with autocast_off(q):
        sinks = real_features(q.to(compute_dtype(q)), options.phi, query_padding_mask)
        state = state_of_source(state, ("sum_k", "sum_k_over_outgoing"), sinks)
        incoming, conserved = sink_flows(sinks, state["sum_k"], state["sum_k_over_outgoing"], options.form)
        weights = flow_weight(conserved, options.allocation, None, None) / incoming
        return ((sinks @ state["sum_kv"]) * weights.unsqueeze(-1)).to(q.dtype)
