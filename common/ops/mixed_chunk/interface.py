"""Mixed chunk attention: quadratic inside a chunk, linear across chunks.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time* (FLASH), ICML 2022, section 3.2, equations 7 and 8.
"""

from torch import Tensor

from ..shared.checks import check_padding_mask, check_query_key_value
from ..shared.forgetting import check_log_decay, decay_of_real_tokens
from ..shared.heads import with_heads
from ..shared.kv_cache import extend_kv_cache
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.relative_bias import check_bias
from ..shared.state import State, check_continuation, state_of_sums, zero_state
from ..shared.tracing import is_compiled
from . import causal_cpu, decoding, forgetting, sizes
from .extra_terms import attend_with_extra_terms
from .gpu import operator as gpu_operator
from .gpu import sequence as gpu_sequence
from .sequence import MixedChunkOptions, Tokens, attend_in_graph, prepare, whole_sequence


@takes_segments("q_quad", "k_quad", "q_lin", "k_lin", "v", "log_decay")
def mixed_chunk_attention(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    bias: Tensor | None = None,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    kernel: str = "relu2",
    local: bool = True,
    linear: bool = True,
    first_softmax: bool = False,
    first_to_all: bool = False,
    overlap: bool = False,
    chunk_summaries: bool = False,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """kernel(q_quad·k_quad / C + bias) v inside each chunk of C tokens, plus q_lin·Σ k_lin vᵀ (FLASH, section 3.2).

    The sum is over all real tokens, divided by their number (Eq. 7), or, causal, over the tokens of earlier chunks,
    divided by C (Eq. 8). With C = ``chunk_size`` and any n: q_quad, k_quad, q_lin and k_lin (B, n, s), v (B, n, e) ->
    (B, n, e), or with heads (B, H, n, s) and (B, H, n, e) -> (B, H, n, e); in v's dtype.
    ``key_padding_mask``: bool (B, n), True = padding, on any side; chunks and positions count real tokens and a padded
    token gives 0. Cost: O(n (C (s + e) + s e)) time, O(n (C + s + e) + (n / C) s e) memory; on a CPU, causal with
    relu2 and both terms, without the n C.

    Args:
        log_decay: causal; the linear term's sum over earlier chunks is multiplied by exp(log_decay_t) at each token t:
            (B, H, n) by head, or (B, H, n, s) by channel of k_lin. See ``forgetting``.
        bias: (2C-1,), entry r + C - 1 for a query r tokens after its key, or (C, C); with heads (H, 2C-1), (H, C, C).
        kernel: ``relu2``, ``laplace``, or ``softmax``, whose scores are divided by √s; see ``score_kernel``.
        local, linear: False omits the term (Figure 7).
        first_softmax: the first real token attends inside its chunk with softmax, whatever the kernel (Table 4).
        first_to_all: the first token of each chunk attends to the whole sequence with softmax in place of its chunk,
            without ``bias``; adds O(n² (s + e) / C) time and O(n² / C) memory (Table 4, "first-to-all").
        overlap: in the quadratic term, a token also attends to the previous chunk and, if not causal, to the next one.
            Scores are divided by the 2C or 3C tokens of these chunks, and ``bias`` is (4C-1,) or (H, 4C-1), entry
            r + 2C - 1 for a query r tokens after its key (section 3.2.1).
        chunk_summaries: add softmax attention to the mean of k_quad and of v of each chunk (causal: of each earlier
            chunk), without ``bias``; adds O(n² (s + e) / C) time and O(n² / C) memory (Appendix A).
        initial_state, return_state: continue a causal sequence. The state has ``count`` (B,) tokens so far, the sums
            ``sum_kv`` of earlier chunks and ``own_kv`` of the current one, (B, H, s, e) each, without rows before they
            have a token, and the current chunk's tokens, ``chunk`` (B, H, <= C, s + e) and ``block`` (B, H, <= R,
            2s + e; with gates s + e) with R <= 16, in float32 (H = 1 without heads). After a single token, the next
            state may share tensors with the previous one. See ``decoding`` and ``sizes``. With ``overlap`` or
            ``chunk_summaries`` the state holds all tokens so far, each input by its name as (B, H, m, s or e) and
            ``padding_mask`` (B, m), and each call computes the whole sequence.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype, mask, bias, name or state that does not fit; ``chunk_size`` below 1; both terms
            omitted; ``first_softmax`` or ``first_to_all`` with ``causal`` or without ``local``; ``overlap`` with one of
            these two or without ``local``; a state or gates without ``causal``; gates without ``linear``, or with
            ``overlap`` or ``chunk_summaries``.
    """
    options = MixedChunkOptions(
        chunk_size, causal, kernel, local, linear, first_softmax, first_to_all, overlap, chunk_summaries
    ).checked()
    tokens, without_heads = with_heads(Tokens._fields, (q_quad, k_quad, q_lin, k_lin, v))
    tokens = Tokens(*tokens)
    _check_tensors(tokens, bias, options, key_padding_mask)
    check_continuation(options.causal, initial_state, return_state)
    if log_decay is not None:
        check_log_decay(log_decay, options.causal, tokens.v, tokens.k_lin.shape[3])
        forgetting.check_terms(options)
    if options.has_extra_terms():
        goes_on = initial_state is not None or return_state
        state = extend_kv_cache(tokens._asdict(), key_padding_mask, initial_state) if goes_on else None
        out = _with_extra_terms(tokens, bias, options, key_padding_mask, state)
        out = out.squeeze(1) if without_heads else out  # (B, 1, n, e) -> (B, n, e)
        return (out, state) if return_state else out
    forgets, s = log_decay is not None, tokens.k_quad.shape[3]
    if initial_state is not None:
        held = sizes.of_state(initial_state, options.chunk_size, s, forgets)
        shapes = decoding.state_shapes(tokens, held, forgets)
        initial_state = state_of_sums(initial_state, shapes, compute_dtype(v), v)
    with autocast_off(v):
        state, dtype = None, compute_dtype(v)
        log_decay = decay_of_real_tokens(log_decay, key_padding_mask, dtype)
        if initial_state is None and not return_state:
            out = _whole(tokens, bias, options, key_padding_mask, log_decay)
        else:
            state = initial_state
            if state is None:
                shapes = decoding.state_shapes(tokens, sizes.first(options.chunk_size, s), forgets)
                state = zero_state(shapes, dtype, v.device)
            prepared, bias = prepare(tokens, bias, key_padding_mask)
            if v.shape[-2] == 1 and key_padding_mask is None:
                out, state = decoding.step(prepared, log_decay, bias, options, state)
            else:
                out, state = decoding.several(prepared, log_decay, bias, options, key_padding_mask, state)
        out = zero_padding(out, key_padding_mask).to(v.dtype)
    out = out.squeeze(1) if without_heads else out  # (B, 1, n, e) -> (B, n, e)
    return (out, state) if return_state else out


def _whole(
    tokens: Tokens,
    bias: Tensor | None,
    options: MixedChunkOptions,
    padding_mask: Tensor | None,
    log_decay: Tensor | None,
) -> Tensor:
    """The outputs (B, H, n, e) of a whole sequence.

    Kernels on a GPU, blocks on a CPU for the paper's language model, otherwise plain PyTorch.
    """
    if log_decay is not None:
        prepared, bias = prepare(tokens, bias, padding_mask)
        return forgetting.whole_sequence(prepared, log_decay, bias, options, padding_mask)
    arguments = (tokens, bias, options, padding_mask)
    if gpu_sequence.applies(tokens, options):
        by_kernels = gpu_operator.whole_sequence if is_compiled() else gpu_operator.guarded_sequence
        return by_kernels(*arguments)
    in_blocks = causal_cpu.applies(tokens, bias, options)
    return whole_sequence(*arguments, causal_cpu.causal_attention_in_blocks if in_blocks else attend_in_graph)


def _with_extra_terms(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None, state: State | None
) -> Tensor:
    """The outputs (B, H, n, e) of ``tokens`` with extra terms; ``state`` holds these and all earlier tokens."""
    v, seen, padding = tokens.v, tokens, padding_mask
    if state is not None:
        seen, padding = Tokens(*(state[name].to(v.dtype) for name in Tokens._fields)), state["padding_mask"]
    with autocast_off(v):
        out = whole_sequence(seen, bias, options, padding, attend_with_extra_terms)
        return zero_padding(out[:, :, -v.shape[2] :], padding_mask).to(v.dtype)


def _check_tensors(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> None:
    """Raise ValueError unless inputs, bias and mask fit together."""
    check_query_key_value(tokens.q_quad, tokens.k_quad, tokens.v, one_length=True, names=("q_quad", "k_quad", "v"))
    for name in ("q_lin", "k_lin"):
        x = getattr(tokens, name)
        if x.shape != tokens.q_quad.shape or x.dtype != tokens.v.dtype or x.device != tokens.v.device:
            raise ValueError(
                f"{name} is {tuple(x.shape)}, {x.dtype}, on {x.device}; allowed: as q_quad, "
                f"{tuple(tokens.q_quad.shape)}, {tokens.v.dtype}, on {tokens.v.device}"
            )
    check_padding_mask("key_padding_mask", padding_mask, tokens.v)
    distances = (2 * options.bias_reach() - 1,)
    if options.overlap and isinstance(bias, Tensor) and bias.shape[-1:] != distances:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; allowed for chunk_size = {options.chunk_size} with overlap: "
            f"{distances}, or that for each head"
        )
    check_bias(bias, options.bias_reach(), tokens.v.shape[1], tokens.v, "chunk_size")
