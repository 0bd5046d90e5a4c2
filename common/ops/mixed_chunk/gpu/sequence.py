"""Mixed chunk attention of a whole sequence by Triton kernels, the host's side: FLASH (ICML 2022), equations 7 and 8.

Scores are computed anew for each tile of channels of v and in the backward pass. Beyond inputs and outputs there are
the (n / C) s e numbers of the sums over chunks, and for the gradient of a bias n C numbers, an eighth at most of them
if it is by distance.

The kernels' file imports Triton, which most machines do not have, so it is imported where kernels are launched.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...shared.autograd import graph_gradients
from ...shared.gpu import dispatch
from ...shared.gpu.first_use import FirstUse, normal_like, sample_like, sample_padding
from ...shared.gpu.launch import at_least_16, ceil_div, on_device_of, processors, rows, strides, tile_rows
from ...shared.padding import put_back, real_first, take, zero_padding
from ...shared.relative_bias import bias_rows, is_toeplitz
from .. import sequence
from ..sequence import MixedChunkOptions, Tokens

NAME = "mixed_chunk_attention"


def applies(tokens: Tokens, options: MixedChunkOptions) -> bool:
    """Whether a whole sequence goes through kernels: s up to 128, relu² or Laplace, no special first tokens."""
    covered = options.kernel in ("relu2", "laplace") and not options.first_softmax and not options.first_to_all
    return (
        dispatch.applies(NAME, tokens.q_quad, tokens.v) and covered and tokens.q_quad.shape[3] <= dispatch.MAX_CHANNELS
    )


class _Call(NamedTuple):
    """The arguments that have no gradient."""

    lengths: Tensor  # real tokens (B,), int32
    divisors: Tensor  # of the products across chunks (B,), float32
    padding: Tensor | None  # the same real tokens as a mask (B, n), True = padding, after them
    options: MixedChunkOptions
    program_per_head: bool | None  # see ``whole_sequence``


def whole_sequence(
    tokens: Tokens,
    bias: Tensor | None,
    options: MixedChunkOptions,
    padding_mask: Tensor | None,
    program_per_head: bool | None = None,
) -> Tensor:
    """``sequence.whole_sequence`` by kernels, in v's dtype; float32, float16 or bfloat16, if ``applies`` is True.

    ``program_per_head``: whether a program forms the sums over all chunks of a head, or of one chunk; None: as it fills
    the GPU. Gradients of gradients come from plain PyTorch. Cost as there.
    """
    order, n = real_first(padding_mask), tokens.v.shape[2]
    tokens = [take(x, order) for x in tokens]
    if padding_mask is None:
        lengths, padding = torch.full((tokens[0].shape[0],), n, device=tokens[0].device), None
    else:
        lengths = (~padding_mask).sum(1)
        padding = torch.arange(n, device=lengths.device) >= lengths[:, None]
    divisors = torch.full_like(lengths, options.chunk_size) if options.causal else lengths.clamp(min=1)
    call = _Call(lengths.int(), divisors.float(), padding, options, program_per_head)
    return put_back(_MixedChunkAttention.apply(*tokens, bias, call), order)


def first_use(tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None) -> FirstUse:
    """Comparison with plain PyTorch, before kernels first take such inputs: 1.5 chunks, at most 1,000 tokens."""
    q, v = tokens.q_quad, tokens.v
    n = min(options.chunk_size + options.chunk_size // 2 + 1, 1000)

    def sample() -> list[Tensor]:
        inputs = [sample_like(x, n, seed) for seed, x in enumerate(tokens)]
        return inputs if bias is None else [*inputs, normal_like(bias, bias.shape, len(inputs))]

    def by(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*x: Tensor) -> Tensor:
            mask = None if padding_mask is None else sample_padding(n, v.device)
            return zero_padding(attend(Tokens(*x[:5]), *(x[5:] or (None,)), options, mask), mask)

        return run

    bias_shape = None if bias is None else (bias.dtype, bias.shape)
    case = (v.dtype, q.shape[3], v.shape[3], q.shape[1], options, bias_shape, padding_mask is not None)
    return FirstUse(NAME, v.device, case, sample, by(whole_sequence), by(sequence.whole_sequence))


class _MixedChunkAttention(torch.autograd.Function):
    """The five inputs, real tokens first, and the bias -> the output."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tokens, bias, call = arguments
        ctx.call = call
        ctx.save_for_backward(*tokens, bias)
        with on_device_of(tokens[0]):
            return _forward(Tokens(*(rows(x) for x in tokens)), bias, call)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *tokens, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[:-1]

        def by_pytorch() -> list[Tensor | None]:
            return _graph_gradients((*tokens, bias), ctx.call, grad_out)

        def by_kernels() -> tuple[Tensor | None, ...]:
            with on_device_of(grad_out):
                return _backward(Tokens(*(rows(x) for x in tokens)), bias, ctx.call, rows(grad_out), needed[-1])

        # With create_graph=True gradients must be differentiable, which those of kernels are not.
        grads = by_pytorch() if torch.is_grad_enabled() else dispatch.guarded(NAME, by_kernels, by_pytorch)
        return (*(grad if need else None for grad, need in zip(grads, needed)), None)


def _graph_gradients(inputs: tuple[Tensor | None, ...], call: _Call, grad_out: Tensor) -> list[Tensor | None]:
    """The gradients of the five inputs and the bias, recomputed in plain PyTorch."""

    def attend(*inputs: Tensor | None) -> Tensor:
        out = sequence.whole_sequence(Tokens(*inputs[:5]), inputs[5], call.options, call.padding)
        return out.to(grad_out.dtype)

    return graph_gradients(attend, inputs, (grad_out,))


class _Shapes:
    """The arguments that every kernel takes, and the grids of programs."""

    def __init__(self, tokens: Tokens, bias: Tensor | None, call: _Call, backward: bool = False) -> None:
        options, (batch, heads, n, s), e = call.options, tokens.q_quad.shape, tokens.v.shape[3]
        tile = tile_rows(tokens.v, s)
        columns = max(tile, 32)
        if backward:  # with larger tiles registers did not suffice; more columns at a time compute fewer scores anew
            exact = tokens.v.dtype == torch.float32
            tile, columns = min(tile, 16 if exact else 32), 64 if exact or s <= 32 else 128
        self.size = min(options.chunk_size, n)  # of a chunk, as far as there are tokens
        self.tile = min(tile, at_least_16(self.size))
        self.heads, self.groups, self.tiles = batch * heads, ceil_div(n, options.chunk_size), ceil_div(self.size, tile)
        columns = min(columns, at_least_16(e))
        self.grid = (self.heads * self.groups * self.tiles,)
        self.parts = ceil_div(e, columns)
        self.span = self.tiles * self.tile * (1 if options.causal else 2)  # distances of queries and keys
        self.counts = (n, heads, self.groups)
        self.bias, self.bias_form, self.bias_stride = _bias(bias, options.chunk_size, tokens.v)
        self.product = {"s": s, "e": e, "C": options.chunk_size, "R": self.tile}
        self.product.update(S=at_least_16(s), E=columns)
        self.all = {**self.product, "causal": options.causal, "kernel": options.kernel, "BIAS": self.bias_form}
        self.all.update(LOCAL=options.local, LINEAR=options.linear)


def _bias(bias: Tensor | None, chunk_size: int, like: Tensor) -> tuple[Tensor, str, int]:
    """The bias for the kernels: float32 numbers, "none", "vector" or "matrix", and the stride of heads."""
    if bias is None:
        return like, "none", 0
    form = "vector" if is_toeplitz(bias, chunk_size) else "matrix"
    per_head = bias.dim() == (2 if form == "vector" else 3) and bias.shape[0] > 1
    bias = bias.float().contiguous()
    return bias, form, bias.stride(0) if per_head else 0


def _sums(x: Tensor, v: Tensor, shapes: _Shapes, call: _Call, reversed_: bool) -> Tensor:
    """Σ x vᵀ before (or, reversed, after) each chunk (B H, G, s, e), or, not causal, of all chunks (B H, 1, s, e).

    One program walks through the chunks of a head and a block of columns, if these are enough to fill a GPU; otherwise
    each chunk has a program, and their sums are added up here.
    """
    from . import kernels

    causal, (heads, blocks) = call.options.causal, (shapes.heads, shapes.parts)
    per_head = call.program_per_head
    per_head = heads * blocks >= processors(x.device) if per_head is None else per_head
    shares = 1 if per_head else shapes.groups
    slots = shapes.groups if causal else shares
    sums = x.new_empty(heads, slots, x.shape[3], v.shape[3], dtype=torch.float32)
    numbers = (*shapes.counts[1:], shares, *strides(x), *strides(v))
    kernels.chunk_sums[heads * shares, blocks](
        x, v, call.lengths, call.divisors, sums, *numbers, **shapes.product, causal=causal, REVERSED=reversed_
    )
    if shares == 1:
        return sums
    return sums.cumsum_(1) if causal else sums.sum(1)


def _forward(tokens: Tokens, bias: Tensor | None, call: _Call) -> Tensor:
    from . import kernels

    shapes = _Shapes(tokens, bias, call)
    q_quad, k_quad, q_lin, k_lin, v = tokens
    sums = _sums(k_lin, v, shapes, call, False) if call.options.linear else v
    out = v.new_empty(v.shape)
    inputs = (q_quad, k_quad, q_lin, v, shapes.bias, call.lengths, call.divisors, sums)
    numbers = (*shapes.counts, shapes.tiles, shapes.bias_stride)
    numbers += (*strides(q_quad), *strides(k_quad), *strides(q_lin), *strides(v))
    kernels.outputs[(*shapes.grid, shapes.parts)](*inputs, out, *numbers, **shapes.all)
    return out


def _backward(
    tokens: Tokens, bias: Tensor | None, call: _Call, grad_out: Tensor, needs_bias: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the five inputs and, if ``needs_bias``, of the bias."""
    from . import kernels

    shapes, local, linear = _Shapes(tokens, bias, call), call.options.local, call.options.linear
    q_quad, k_quad, q_lin, k_lin, v = tokens
    sums = _sums(k_lin, v, shapes, call, False) if linear else v
    reversed_sums = _sums(q_lin, grad_out, shapes, call, True) if linear else v
    # Inputs of an omitted term have no gradient.
    grads = [x.new_empty(x.shape) if used else None for x, used in zip(tokens, (local, local, linear, linear, True))]
    small = _Shapes(tokens, bias, call, backward=True)
    by_distance = small.bias_form == "vector" and kernels.HAS_GATHER
    grad_bias = _room_for_bias(small, v, by_distance) if needs_bias and local else None
    inputs = (q_quad, k_quad, k_lin, v, grad_out, small.bias, call.lengths, call.divisors, sums, reversed_sums)
    outputs = (v if x is None else x for x in (*grads, grad_bias))
    numbers = (*small.counts, small.tiles, small.parts, small.size, small.bias_stride)
    numbers += (*strides(q_quad), *strides(k_quad), *strides(k_lin), *strides(v), *strides(grad_out))
    of_bias = "none" if grad_bias is None else "distances" if by_distance else "scores"
    # Neighbours in the grid read the same chunk, so that the GPU's cache has it.
    kernels.gradients[(2 * small.grid[0],)](*inputs, *outputs, *numbers, **small.all, OF_BIAS=of_bias)
    if grad_bias is None:
        return (*grads, None)
    total = grad_bias.view(-1, v.shape[1], *grad_bias.shape[1:])  # (B, H, G, ...)
    return (*grads, (_of_distances if by_distance else _of_scores)(bias, total, small, call))


def _room_for_bias(shapes: _Shapes, like: Tensor, by_distance: bool) -> Tensor:
    """Zeros for the parts of the gradient of a bias that ``gradients`` writes."""
    size, span = (shapes.size, shapes.size), (shapes.tiles, shapes.span)
    return like.new_zeros(shapes.heads, shapes.groups, *(span if by_distance else size), dtype=torch.float32)


def _of_distances(bias: Tensor, grads: Tensor, shapes: _Shapes, call: _Call) -> Tensor:
    """The gradient of a bias by distance from each program's (B, H, G, T, span)."""
    total = grads.sum((0, 2, 3)).sum_to_size(*bias.shape[:-1], shapes.span)
    size, chunk_size = shapes.size, call.options.chunk_size
    zero, lowest = (0, 0) if call.options.causal else (shapes.span // 2, 1 - size)
    grad = bias.new_zeros(bias.shape)
    grad[..., chunk_size - 1 + lowest : chunk_size - 1 + size] = total[..., zero + lowest : zero + size]
    return grad


def _of_scores(bias: Tensor, grads: Tensor, shapes: _Shapes, call: _Call) -> Tensor:
    """The gradient of a bias of any form from that of the scores (B, H, G, size, size)."""
    total = grads.sum((0, 2))  # (H, size, size)
    with torch.enable_grad():
        leaf = bias.detach().float().requires_grad_()
        per_head = bias_rows(leaf, call.options.chunk_size, 0, shapes.size, shapes.size).expand_as(total)
        return torch.autograd.grad(per_head, leaf, total)[0].to(bias.dtype)
