"""Mixed chunk attention: quadratic inside a chunk, linear across chunks.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time* (FLASH), ICML 2022, section 4, equations 7 and 8.
"""

import math
from typing import Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from .alignment import invert, put_back, real_first, take
from .checks import State, check_choice, check_padding_mask, check_positive_int, check_query_key_value, check_state
from .chunks import autocast_off, carry_sums, compute_dtype, split_chunks, zero_padding
from .eager import runs_eagerly
from .gau_attention import with_heads
from .mixed_chunk_piece import Tokens as _Tokens
from .mixed_chunk_pieces import attend_in_pieces
from .relative_bias import bias_at, bias_matrix, bias_rows, check_bias
from .score_kernels import SCORE_KERNELS, score_kernel
from .triton import dispatch


class _Options(NamedTuple):
    """What the forms below share."""

    chunk_size: int
    bias: Optional[Tensor]
    causal: bool
    kernel: str
    local: bool
    linear: bool
    first_softmax: bool
    first_to_all: bool


def mixed_chunk_attention(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    bias: Optional[Tensor] = None,
    causal: bool = False,
    key_padding_mask: Optional[Tensor] = None,
    kernel: str = "relu2",
    local: bool = True,
    linear: bool = True,
    first_softmax: bool = False,
    first_to_all: bool = False,
    initial_state: Optional[State] = None,
    return_state: bool = False,
) -> Union[Tensor, Tuple[Tensor, State]]:
    """kernel(q_quad·k_quad / C + bias) v inside each chunk of C tokens, plus q_lin·Σ k_lin vᵀ (FLASH, section 4).

    The sum is over all real tokens, divided by their number (Eq. 7), or, causal, over those of earlier chunks, divided
    by C (Eq. 8). B batch, H heads, n tokens, s and e channels, C = ``chunk_size``, any n: q_quad, k_quad, q_lin and
    k_lin (B, n, s), v (B, n, e) -> (B, n, e), or with heads (B, H, n, s) and (B, H, n, e) -> (B, H, n, e); v's dtype.
    ``key_padding_mask``: bool (B, n), True = padding, on any side; chunks and positions count real tokens and a padded
    token gives 0. Cost: O(n (C (s + e) + s e)) time, O(n (C + s + e) + (n / C) s e) memory; without the n C on a CPU
    when causal, of relu2 and of both terms: see ``attend_in_pieces``.

    Args:
        bias: (2C-1,), entry r + C - 1 for a query r tokens after its key, or (C, C); with heads (H, 2C-1), (H, C, C).
        kernel: ``relu2``, ``laplace``, or ``softmax``, whose scores are divided by √s; see ``score_kernel``.
        local, linear: leave one of the two terms out (Figure 7).
        first_softmax: the first real token attends inside its chunk with softmax, whatever the kernel (Table 4).
        first_to_all: the first token of each chunk attends to the whole sequence with softmax in place of its chunk,
            without ``bias``; adds O(n² (s + e) / C) time and O(n² / C) memory (Table 4, "first-to-all").
        initial_state, return_state: continue a causal sequence. The state does not grow: ``count`` (B,) tokens so far,
            ``sum_kv`` (B, H, s, e) and rings of C tokens, ``k_quad`` and ``k_lin`` (B, H, C, s) and ``v`` (B, H, C, e),
            in float32 (H = 1 without heads). Slots below count mod C hold the current chunk, the others the chunk
            before it, which ``sum_kv`` takes in slot by slot as they are overwritten: every step costs the same.

    Raises:
        ValueError: a shape, dtype, mask, bias, name or state that does not fit; ``chunk_size`` below 1; both terms left
            out; ``first_softmax`` or ``first_to_all`` of a causal sequence or without the local term; a state of one
            that is not causal.
    """
    if not isinstance(q_quad, Tensor) or q_quad.dim() not in (3, 4):
        given = tuple(q_quad.shape) if isinstance(q_quad, Tensor) else type(q_quad).__name__
        raise ValueError(f"q_quad is {given}; allowed: a tensor (B, n, s) or (B, H, n, s)")
    without_heads = q_quad.dim() == 3
    tokens = _Tokens(*with_heads(_Tokens._fields, (q_quad, k_quad, q_lin, k_lin, v), without_heads))
    options = _Options(chunk_size, bias, causal, kernel, local, linear, first_softmax, first_to_all)
    _check(tokens, options, key_padding_mask)
    if not causal and (initial_state is not None or return_state):
        raise ValueError("initial_state and return_state are given with causal=False; allowed: only with causal=True")
    dtype = compute_dtype(v)
    if initial_state is not None:
        like = _empty_state(tokens, chunk_size)
        check_state(initial_state, {name: x.shape for name, x in like.items()}, dtype, v)
    with autocast_off(v):
        state = None
        if initial_state is None and not return_state:
            out = _whole_by_kernels(tokens, options, key_padding_mask)
        else:
            state = _empty_state(tokens, chunk_size) if initial_state is None else initial_state
            continued = _step if v.shape[-2] == 1 else _continued
            out, state = continued(*_computable(tokens, options, key_padding_mask), key_padding_mask, state)
        out = zero_padding(out, key_padding_mask).to(v.dtype)
    out = out.squeeze(1) if without_heads else out  # (B, 1, n, e) -> (B, n, e)
    return (out, state) if return_state else out


def _check(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor]) -> None:
    """Raise ValueError for anything but the state."""
    check_query_key_value(tokens.q_quad, tokens.k_quad, tokens.v, one_length=True, names=("q_quad", "k_quad", "v"))
    for name in ("q_lin", "k_lin"):
        x = getattr(tokens, name)
        if x.shape != tokens.q_quad.shape or x.dtype != tokens.v.dtype or x.device != tokens.v.device:
            raise ValueError(
                f"{name} is {tuple(x.shape)}, {x.dtype}, on {x.device}; allowed: as q_quad, "
                f"{tuple(tokens.q_quad.shape)}, {tokens.v.dtype}, on {tokens.v.device}"
            )
    check_padding_mask("key_padding_mask", padding_mask, tokens.v)
    check_choice("kernel", options.kernel, SCORE_KERNELS)
    check_positive_int("chunk_size", options.chunk_size)
    check_bias(options.bias, options.chunk_size, tokens.v.shape[1], tokens.v, "chunk_size")
    if not options.local and not options.linear:
        raise ValueError("local and linear are both False; allowed: one of them, or both")
    for name in ("first_softmax", "first_to_all"):
        if getattr(options, name) and (options.causal or not options.local):
            raise ValueError(
                f"{name} is True with causal={options.causal} and local={options.local}; "
                "allowed: only with causal=False and local=True"
            )


def _computable(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor]) -> Tuple[_Tokens, _Options]:
    """Inputs and bias in the dtype sums are in, and padding cleared before anything else, since 0 * NaN is NaN."""
    dtype = compute_dtype(tokens.v)
    tokens = _Tokens(*(zero_padding(x.to(dtype), padding_mask) for x in tokens))
    bias = None if options.bias is None else options.bias.to(dtype)
    # Not _replace, which torch.compile of torch 2.6 does not trace.
    size, _, causal, kernel, local, linear, first_softmax, first_to_all = options
    return tokens, _Options(size, bias, causal, kernel, local, linear, first_softmax, first_to_all)


def _whole_by_kernels(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor]) -> Tensor:
    """A whole sequence, by kernels on a GPU."""
    given, first = (tokens, options, padding_mask), options.first_softmax or options.first_to_all
    if dispatch.mixed_chunk_attention_applies(tokens.q_quad, tokens.v, options.kernel, first):
        return dispatch.attempt("mixed_chunk_attention", "whole_sequence", whole_sequence, given)
    return whole_sequence(*given)


def whole_sequence(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor]) -> Tensor:
    """A whole sequence."""
    tokens, options = _computable(tokens, options, padding_mask)
    order = real_first(padding_mask)
    tokens = _Tokens(*(take(x, order) for x in tokens))
    attend = _in_pieces if _goes_in_pieces(tokens, options) else _plain
    return put_back(attend(tokens, options, padding_mask), order)


def _goes_in_pieces(tokens: _Tokens, options: _Options) -> bool:
    """Whether this is the paper's language model on a CPU, and nothing looks into the operations."""
    paper = options.causal and options.local and options.linear and options.kernel == "relu2"
    given = tokens if options.bias is None else (*tokens, options.bias)
    return paper and tokens.v.device.type == "cpu" and runs_eagerly(*given)


def _in_pieces(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor]) -> Tensor:
    """A causal sequence whose real tokens come first, and where padding is zero."""

    def plain(*inputs: Tensor) -> Tensor:
        return _plain(_Tokens(*inputs[:5]), options._replace(bias=inputs[5]), None)

    bias = None if options.bias is None else bias_matrix(options.bias, options.chunk_size)
    return attend_in_pieces(tokens, bias, options.chunk_size, plain)


def _plain(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor]) -> Tensor:
    """A sequence whose real tokens come first, as a graph of torch's functions."""
    n = tokens.v.shape[2]
    real = None if padding_mask is None else (~padding_mask).sum(1)  # (B,)
    chunks = _split(tokens, min(options.chunk_size, n))
    linear = None
    if options.linear and options.causal:
        linear, _ = carry_sums(_chunk_sums(chunks), None)  # (B, H, G, s, e)
    elif options.linear:
        count = n if real is None else real.clamp(min=1).to(tokens.v.dtype)[:, None, None, None]
        linear = (tokens.k_lin.transpose(-2, -1) @ tokens.v / count).unsqueeze(2)  # (B, H, 1, s, e)
    hidden = _hidden(chunks, options, n, real)
    return _attend(chunks, linear, options, hidden, tokens, real)[:, :, :n]


def _split(tokens: _Tokens, chunk_size: int) -> _Tokens:
    """(B, H, n, c) -> (B, H, G, C, c) each."""
    return _Tokens(*(split_chunks(x, chunk_size) for x in tokens))


def _chunk_sums(chunks: _Tokens) -> Tensor:
    """Σ k_lin vᵀ of each chunk, (B, H, G, s, e)."""
    return chunks.k_lin.transpose(-2, -1) @ chunks.v


def _hidden(chunks: _Tokens, options: _Options, n: int, real: Optional[Tensor]) -> Optional[Tensor]:
    """Which keys of a chunk its queries do not see: (C, C) when causal, else (B, 1, G, 1, C), or None for none."""
    groups, size = chunks.v.shape[2:4]
    slot = torch.arange(size, device=chunks.v.device)
    if options.causal:
        return slot > slot[:, None]
    if real is None and groups * size == n:
        return None
    position = torch.arange(groups * size, device=chunks.v.device).view(groups, size)
    end = real[:, None, None] if real is not None else torch.full((1, 1, 1), n, device=chunks.v.device)
    return (position >= end)[:, None, :, None, :]


def _attend(
    chunks: _Tokens,
    linear: Optional[Tensor],
    options: _Options,
    hidden: Optional[Tensor],
    tokens: _Tokens,
    real: Optional[Tensor],
) -> Tensor:
    """Both terms of every chunk: (B, H, G C, e)."""
    out = None
    if options.local:
        out = _local(chunks, options, hidden)
        if options.first_to_all:
            out = _replace_first(out, _first_to_all(chunks, tokens, real))
    if linear is not None:
        # Of a causal sequence the sums are undivided; C is the model's constant, also where n < C.
        q_lin = chunks.q_lin / options.chunk_size if options.causal else chunks.q_lin
        across = q_lin @ linear
        out = across if out is None else out + across
    return out.flatten(2, 3)  # (B, H, G, C, e) -> (B, H, G C, e)


def _local(chunks: _Tokens, options: _Options, hidden: Optional[Tensor]) -> Tensor:
    """The quadratic term inside each chunk, (B, H, G, C, e)."""
    size, s = chunks.q_quad.shape[3:]
    softmax = options.kernel == "softmax"
    scores = (chunks.q_quad / _divisor(options, s)) @ chunks.k_quad.transpose(-2, -1)  # (B, H, G, C, C)
    bias = None
    if options.bias is not None:
        bias = bias_rows(options.bias, options.chunk_size, 0, size, size)  # (C, C) or (H, C, C)
        bias = bias.unsqueeze(1) if bias.dim() == 3 else bias
        scores = scores + bias
    out = score_kernel(scores, options.kernel, hidden) @ chunks.v
    if options.first_softmax and not options.first_to_all and not softmax:
        first = (chunks.q_quad[:, :, :1, :1] / math.sqrt(s)) @ chunks.k_quad[:, :, :1].transpose(-2, -1)
        first = first if bias is None else first + bias[..., :1, :]
        weights = score_kernel(first, "softmax", None if hidden is None else hidden[:, :, :1])  # (B, H, 1, 1, C)
        beginning = _replace_first(out[:, :, :1], (weights @ chunks.v[:, :, :1]).squeeze(3))
        out = torch.cat([beginning, out[:, :, 1:]], dim=2)
    return out


def _divisor(options: _Options, s: int) -> float:
    """Of the scores inside a chunk: its length, full or not, or √s for softmax."""
    return math.sqrt(s) if options.kernel == "softmax" else float(options.chunk_size)


def _replace_first(out: Tensor, first: Tensor) -> Tensor:
    """``out`` (B, H, G, C, e) with ``first`` (B, H, G, e) as each chunk's first row."""
    return torch.cat([first.unsqueeze(3), out[:, :, :, 1:]], dim=3)


def _first_to_all(chunks: _Tokens, tokens: _Tokens, real: Optional[Tensor]) -> Tensor:
    """Softmax attention of each chunk's first token to the whole sequence: (B, H, G, e)."""
    first = chunks.q_quad[:, :, :, 0] / math.sqrt(chunks.q_quad.shape[4])  # (B, H, G, s)
    scores = first @ tokens.k_quad.transpose(-2, -1)  # (B, H, G, n)
    hidden = None
    if real is not None:
        position = torch.arange(tokens.v.shape[2], device=real.device)
        hidden = (position >= real[:, None])[:, None, None, :]  # (B, 1, 1, n)
    return score_kernel(scores, "softmax", hidden) @ tokens.v


def _empty_state(tokens: _Tokens, chunk_size: int) -> State:
    """The state before the first token."""
    batch, heads, _, s = tokens.k_quad.shape
    e, like = tokens.v.shape[3], {"dtype": compute_dtype(tokens.v), "device": tokens.v.device}
    return {
        "count": torch.zeros(batch, dtype=torch.long, device=tokens.v.device),
        "sum_kv": torch.zeros(batch, heads, s, e, **like),
        "k_quad": torch.zeros(batch, heads, chunk_size, s, **like),
        "k_lin": torch.zeros(batch, heads, chunk_size, s, **like),
        "v": torch.zeros(batch, heads, chunk_size, e, **like),
    }


def _step(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor], state: State) -> Tuple[Tensor, State]:
    """One token after ``state``; the same O(C (s + e) + s e) at every position."""
    size = options.chunk_size
    slot = state["count"] % size  # (B,)
    index = slot[:, None, None, None]
    rings: Dict[str, Tensor] = {}
    leaving = {}
    for name in ("k_quad", "k_lin", "v"):
        ring, new = state[name], getattr(tokens, name)
        at = index.expand(-1, ring.shape[1], 1, ring.shape[3])
        leaving[name] = ring.gather(2, at)  # (B, H, 1, c)
        rings[name] = ring.scatter(2, at, new)
    sum_kv = state["sum_kv"] + leaving["k_lin"].transpose(-2, -1) @ leaving["v"]
    earlier = torch.arange(size, device=slot.device) > index  # (B, 1, 1, C): slots of the chunk before
    out = None
    if options.local:
        scores = tokens.q_quad / _divisor(options, tokens.q_quad.shape[3]) @ rings["k_quad"].transpose(-2, -1)
        if options.bias is not None:
            scores = scores + bias_at(options.bias, size, slot[:, None])
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


def _continued(
    tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor], state: State
) -> Tuple[Tensor, State]:
    """n tokens after ``state``: the chunked form over its two chunks and them."""
    batch, n, size = tokens.v.shape[0], tokens.v.shape[2], options.chunk_size
    slot = (state["count"] % size)[:, None]  # (B, 1)
    current = torch.arange(size, device=slot.device) < slot  # (B, C): slots of the current chunk
    if padding_mask is None:
        padding_mask = torch.zeros(batch, n, dtype=torch.bool, device=slot.device)
    frame_padding = torch.cat([torch.zeros_like(current), ~current, padding_mask], dim=1)  # (B, 2C + n)
    order = real_first(frame_padding)
    none = torch.zeros_like(state["k_lin"])  # queries, which the state does not hold
    frame = []
    for name, x in zip(_Tokens._fields, tokens):
        ring, now = state.get(name, none), current[:, None, :, None]
        parts = [ring.masked_fill(now, 0.0), ring.masked_fill(~now, 0.0), x]  # chunk before, current chunk, new tokens
        frame.append(take(torch.cat(parts, dim=2), order))
    frame = _Tokens(*frame)
    # One chunk more, so that there is always one behind the last full one.
    chunks = _split(_Tokens(*(F.pad(x, (0, 0, 0, size)) for x in frame)), size)
    sums, _ = carry_sums(_chunk_sums(chunks), state["sum_kv"])  # (B, H, G, s, e): before each chunk
    out = _attend(chunks, sums if options.linear else None, options, _hidden(chunks, options, n, None), frame, None)
    out = take(out[:, :, : 2 * size + n], invert(order))[:, :, 2 * size :]
    end = size + slot + (~padding_mask).sum(1, keepdim=True)  # (B, 1): real tokens of the frame
    new_state = _state_at(chunks, sums, end, size)
    new_state["count"] = state["count"] + (~padding_mask).sum(1)
    return out, new_state


def _state_at(chunks: _Tokens, sums: Tensor, end: Tensor, size: int) -> State:
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
