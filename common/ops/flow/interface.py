"""Flow-Attention: attention as a flow network with conserved capacities, linear in the sequence length.

Wu, Wu, Xu, Wang, Long, *Flowformer: Linearizing Transformers with Conservation Flows*, ICML 2022, equations 4-8,
Algorithm 1 (not causal) and Algorithm 2 (causal).
"""

import torch
from torch import Tensor

from ..shared.checks import check_both_masks, check_masks, check_positive_int, check_query_key_value
from ..shared.chunks import CHUNK_SIZE, chunk_length
from ..shared.cpu.dispatch import applies, step_of
from ..shared.forgetting import check_log_decay
from ..shared.packed import takes_segments
from ..shared.padding import either_mask
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.state import State, check_continuation, state_of_sums
from ..shared.tracing import is_compiled, runs_eagerly
from .causal import (
    CausalInputs,
    attention_in_chunks,
    causal_flow,
    chunk_features,
    chunk_positions,
    chunk_scores,
    joined,
    state_shapes,
)
from .cpu import causal as causal_cpu
from .cpu import full as full_cpu
from .decoding import step
from .forgetting import attention_that_forgets, weights_that_forget
from .forgetting import state_shapes as state_shapes_with_gates
from .full import flow_attention_in_graph, full_flow
from .full_eager import full_attention
from .gpu import causal as causal_gpu
from .gpu import operator as causal_gpu_operator
from .options import DEFAULTS, FlowOptions, flow_options


@takes_segments("q", "k", "v", "log_decay")
def flow_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    form: str = DEFAULTS.form,
    clamp: float | None = DEFAULTS.clamp,
    phi: str = DEFAULTS.phi,
    competition: str = DEFAULTS.competition,
    allocation: str = DEFAULTS.allocation,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Flow-Attention of q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e), in v's dtype.

    Incoming flow I_i = phi(q_i)·Σ_j phi(k_j) and outgoing flow O_j = phi(k_j)·Σ_i phi(q_i) (Eq. 4), conserved
    Î_i = phi(q_i)·Σ_j phi(k_j)/O_j and Ô_j = phi(k_j)·Σ_i phi(q_i)/I_i (Eq. 5, 7), then
    R_i = sigmoid(Î_i) · phi(q_i)/I_i · Σ_j phi(k_j)ᵀ softmax(Ô)_j v_j (Eq. 8). Causal (Algorithm 2), every sum
    runs over j <= i and is divided by the number of real tokens up to i.

    Masks: bool, ``key_padding_mask`` (B, m), ``query_padding_mask`` (B, n), True = padding. Padding on either side
    never changes the output of a real token and gives 0 itself, also in rows of only padding. Causal, a token is both
    source and sink, and it is padding if either mask marks it. Not causal, pass both masks or neither, because padded
    sinks would take flow from real ones; in self-attention pass the same mask twice.

    Args:
        log_decay: causal; every sum of Algorithm 2, the softmaxes' sums and the count are multiplied by
            exp(log_decay_t) before token t is added: (B, H, n) by head, or (B, H, n, d) by channel, each channel with
            its own count. The state then has ``remembered`` (B, H) in place of ``count``; by channel, this and both
            logarithms are (B, H, d).
        form: "paper" is Algorithms 1 and 2 to the letter; "released" adds the authors' 1e-6 to q, k and the sums,
            multiplies the softmax by m and Î by n/m; "released_vision" adds 1e-6 to every flow as well.
        clamp: bound on |Ô| in the released forms; ignored by "paper", which has no bound. Part of the trained model:
            5 in the authors' fairseq language model, 10 in their RL model, none (None or inf) in their time series and
            long-range-arena code. Their image model had 5 and has 1 since f15165d, their core module 10, and 1 since
            8a1774b.
        phi: "sigmoid", "elu+1" or "relu" (plus 1e-6) (Table 10).
        competition: "softmax" over the sources, "sigmoid" or "none" (Table 11). "softmax_heads", not causal, is the
            variant of the authors' long-range-arena code: a softmax over the heads of each source, times m if the
            form rescales. Sources do not compete in it, and with one head it is constant.
        allocation: "sigmoid", "softmax" over the sinks or "none" (Table 11); the softmax is multiplied by the
            number of sinks if the form multiplies the competition by the number of sources.
        chunk_size: C of the causal algorithm, any length; results do not depend on it.
        initial_state: causal; the state that a call with the earlier tokens returned. Calls with one or several tokens
            continue a sequence exactly.
        return_state: causal; also return the state after the last token: ``count`` (B,), ``sum_k``, ``sum_q``,
            ``sum_k_over_outgoing``, ``sum_q_over_incoming`` (B, H, d), ``log_competition``, ``log_allocation``
            (B, H), ``sum_kv`` (B, H, d, e). float32 and of constant size; the batch is dimension 0 of each.

    Cost: O(n d e) time; causal, O(n (C + d) + (n / C) d e) memory, nothing of size n x n. Sums and normalisers are
    float32 (float64 for float64 inputs), also under autocast.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype, mask, name, clamp, chunk size or state that does not fit; a state or gates without
            causal; only one mask without causal; a competition over heads with causal.
    """
    options = flow_options(form, clamp, phi, competition, allocation, causal)
    check_positive_int("chunk_size", chunk_size)
    _check_tensors(q, k, v, causal, key_padding_mask, query_padding_mask)
    check_continuation(causal, initial_state, return_state)
    check_log_decay(log_decay, causal, q, q.shape[3])
    dtype = compute_dtype(q)
    with autocast_off(q):
        if not causal:
            return _full(q, k, v, key_padding_mask, query_padding_mask, options)
        shapes = state_shapes(q, v) if log_decay is None else state_shapes_with_gates(q, v, log_decay)
        state = state_of_sums(initial_state, shapes, dtype, q)
        padding, out_dtype = either_mask(key_padding_mask, query_padding_mask), v.dtype
        inputs = CausalInputs(q, k, v, padding, options, chunk_size, state)
        out, state = _causal(inputs) if log_decay is None else attention_that_forgets(inputs, log_decay)
        out = in_dtype(out, out_dtype)
    return (out, state) if return_state else out


@step_of(flow_attention)
def _step(q: Tensor, k: Tensor, v: Tensor, state: State, options: FlowOptions) -> tuple[Tensor, State]:
    """``flow_attention`` of one token after ``state``; see ``step_of``."""
    return causal_cpu.step(q, k, v, options, state)


def _full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    options: FlowOptions,
) -> Tensor:
    """Attention of all sinks with all sources: by kernels on a CPU, otherwise plain PyTorch.

    Plain PyTorch has a hand-written backward pass, except for tracing and function transforms.
    """
    masks = key_padding_mask, query_padding_mask
    if q.is_cpu:
        dtype = compute_dtype(q)
        tensors = in_dtype(q, dtype), in_dtype(k, dtype), in_dtype(v, dtype)
        if applies(*tensors):
            return in_dtype(full_cpu.full_attention(*tensors, *masks, options), v.dtype)
    attend = full_attention if runs_eagerly(q, k, v) else flow_attention_in_graph
    return attend(q, k, v, *masks, options)


def _causal(inputs: CausalInputs) -> tuple[Tensor, State]:
    """Causal attention: by kernels on a CPU and on a GPU, otherwise plain PyTorch.

    torch.compile sees kernels as one operator, or plain PyTorch if there are no kernels.
    """
    q, k, v = inputs.q, inputs.k, inputs.v  # no slice: torch.compile of torch 2.6 does not support it
    # Before the kernels for CPUs, since Triton's interpreter takes the place of a GPU.
    if causal_gpu.applies(q, k, v):
        by_kernels = causal_gpu_operator.causal_attention if is_compiled() else causal_gpu_operator.guarded_attention
        return by_kernels(inputs)
    dtype = compute_dtype(q)
    if q.dtype != dtype:  # only kernels for GPUs read half precision
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        inputs = CausalInputs(q, k, v, *inputs[3:])
    if causal_cpu.applies(inputs):
        return causal_cpu.causal_attention(inputs)
    if q.shape[2] == 1 and not q.is_cuda and inputs.state is not None and inputs.padding is None:
        return step(inputs)
    return attention_in_chunks(inputs)


def flow_attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    form: str = DEFAULTS.form,
    clamp: float | None = DEFAULTS.clamp,
    phi: str = DEFAULTS.phi,
    competition: str = DEFAULTS.competition,
    allocation: str = DEFAULTS.allocation,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
) -> tuple[Tensor, Tensor]:
    """The competition weight of every source (B, H, m) and allocation weight of every sink (B, H, n).

    Figures 4, 5 and 7 to 9 show them.

    These are exactly the factors by which ``flow_attention`` with the same arguments multiplies values and results, so
    the released softmax competition is around 1, not around 1/m. 0 at padding. With gates by channel, the weight of a
    token is the mean over its channels. Cost and errors as in ``flow_attention``. ``initial_state`` (causal) is the
    state of ``flow_attention`` after the earlier tokens.
    """
    options = flow_options(form, clamp, phi, competition, allocation, causal)
    check_positive_int("chunk_size", chunk_size)
    _check_tensors(q, k, k, causal, key_padding_mask, query_padding_mask)
    check_continuation(causal, initial_state, return_state=False)
    check_log_decay(log_decay, causal, q, q.shape[3])
    with autocast_off(q):
        dtype = compute_dtype(q)
        if not causal:
            flow = full_flow(q.to(dtype), k.to(dtype), key_padding_mask, query_padding_mask, options)
            sources, sinks = flow.competition, flow.allocation
        elif log_decay is not None:
            key_padding_mask = query_padding_mask = either_mask(key_padding_mask, query_padding_mask)
            state = _state_without_values(initial_state, q, state_shapes_with_gates(q, q, log_decay))
            inputs = CausalInputs(q, k, k, key_padding_mask, options, chunk_size, state)
            sources, sinks = weights_that_forget(inputs, log_decay)
        else:
            key_padding_mask = query_padding_mask = either_mask(key_padding_mask, query_padding_mask)
            length, size = q.shape[2], chunk_length(chunk_size, q.shape[2])
            state = _state_without_values(initial_state, q, state_shapes(q, q))
            positions = chunk_positions(q, key_padding_mask, size, state)
            features = chunk_features(q, k, phi, key_padding_mask, size)
            flow, _ = causal_flow(features, chunk_scores(features), positions, options, state)
            sources, sinks = joined(flow.competition, length), joined(flow.allocation, length)
    if key_padding_mask is not None:
        sources = sources.masked_fill(key_padding_mask[:, None], 0.0)
    if query_padding_mask is not None:
        sinks = sinks.masked_fill(query_padding_mask[:, None], 0.0)
    return sources, sinks


def _state_without_values(state: State | None, q: Tensor, shapes: dict[str, tuple[int, ...]]) -> State | None:
    """``state``, checked, without its sum over values, which the weights of q (B, H, n, d) do not need."""
    if isinstance(state, dict):
        state = {name: x for name, x in state.items() if name != "sum_kv"}
    shapes = {name: shape for name, shape in shapes.items() if name != "sum_kv"}
    return state_of_sums(state, shapes, compute_dtype(q), q)


def flow_attention_map(q: Tensor, k: Tensor, *, causal: bool = False, max_tokens: int = 4096, **options) -> Tensor:
    """The attention map (B, H, n, m) that Flow-Attention never forms: ``map @ v`` is its output.

    For inspecting short inputs: O(n m) memory, ``options`` and errors as in ``flow_attention``.

    Raises:
        ValueError: also for more than ``max_tokens`` sinks or sources.
    """
    check_query_key_value(q, k, k, causal)
    n, m, dtype = q.shape[2], k.shape[2], compute_dtype(q)
    if max(n, m) > max_tokens:
        raise ValueError(f"q and k have {n} and {m} tokens; allowed: at most max_tokens={max_tokens} each")
    # The output for one-hot values is the share of each source in each sink.
    identity = torch.eye(m, dtype=dtype, device=k.device).expand(*k.shape[:2], m, m)
    return flow_attention(q.to(dtype), k.to(dtype), identity, causal=causal, **options)


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
) -> None:
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    if not causal:
        check_both_masks(key_padding_mask, query_padding_mask)
