"""Mixed chunk attention of a whole sequence by Triton kernels, the host's side: FLASH (ICML 2022), equations 7 and 8.

Scores are computed anew for each tile of channels of v and in the backward pass. Beyond inputs and outputs there are
the (n / C) s e numbers of the sums over chunks, and n C numbers for the gradient of a bias.

The kernels' file imports Triton, so it is imported where they are launched: on most machines there is none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..shared.autograd import graph_gradients
from ..shared.gpu import dispatch
from ..shared.gpu.first_use import FirstUse, normal_like, sample_like, sample_padding
from ..shared.gpu.launch import at_least_16, ceil_div, on_device_of, rows, strides, tile_rows
from ..shared.padding import put_back, real_first, take, zero_padding
from ..shared.relative_bias import bias_rows, is_toeplitz
from . import sequence
from .sequence import MixedChunkOptions, Tokens

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
    padding: Tensor | None  # the same real tokens as a mask (B, n), True = padding, behind them
    options: MixedChunkOptions


def whole_sequence(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """``sequence.whole_sequence`` by kernels, in v's dtype; float32, float16 or bfloat16 and what ``applies`` says.

    Gradients of gradients come from plain PyTorch. Cost as there.
    """
    order, n = real_first(padding_mask), tokens.v.shape[2]
    tokens = [take(x, order) for x in tokens]
    if padding_mask is None:
        lengths, behind = torch.full((tokens[0].shape[0],), n, device=tokens[0].device), None
    else:
        lengths = (~padding_mask).sum(1)
        behind = torch.arange(n, device=lengths.device) >= lengths[:, None]
    divisors = torch.full_like(lengths, options.chunk_size) if options.causal else lengths.clamp(min=1)
    call = _Call(lengths.int(), divisors.float(), behind, options)
    return put_back(_MixedChunkAttention.apply(*tokens, bias, call), order)


def first_use(tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None) -> FirstUse:
    """What is compared before kernels take such inputs for the first time: a chunk and a half, at most 1,000 tokens."""
    q, v = tokens.q_quad, tokens.v
    n = min(options.chunk_size + options.chunk_size // 2 + 1, 1000)

    def sample() -> list[Tensor]:
        found = [sample_like(x, n, seed) for seed, x in enumerate(tokens)]
        return found if bias is None else [*found, normal_like(bias, bias.shape, len(found))]

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

        # With create_graph=True gradients must have gradients themselves, which those of kernels have not.
        grads = by_pytorch() if torch.is_grad_enabled() else dispatch.guarded(NAME, by_kernels, by_pytorch)
        return (*(grad if need else None for grad, need in zip(grads, needed)), None)


def _graph_gradients(inputs: tuple[Tensor | None, ...], call: _Call, grad_out: Tensor) -> list[Tensor | None]:
    """The gradients of the five inputs and the bias by plain PyTorch, computed once more."""

    def attend(*inputs: Tensor | None) -> Tensor:
        out = sequence.whole_sequence(Tokens(*inputs[:5]), inputs[5], call.options, call.padding)
        return out.to(grad_out.dtype)

    return graph_gradients(attend, inputs, (grad_out,))


class _Shapes:
    """The arguments that every kernel takes, and the grids of programs."""

    def __init__(self, tokens: Tokens, bias: Tensor | None, call: _Call, most_rows: int = 64) -> None:
        options, (batch, heads, n, s), e = call.options, tokens.q_quad.shape, tokens.v.shape[3]
        tile = min(most_rows, tile_rows(tokens.v, s))
        self.size = min(options.chunk_size, n)  # of a chunk, as far as there are tokens
        self.tile = min(tile, at_least_16(self.size))
        self.heads, self.groups, self.tiles = batch * heads, ceil_div(n, options.chunk_size), ceil_div(self.size, tile)
        columns = min(max(tile, 32), at_least_16(e))
        self.grid = (self.heads * self.groups * self.tiles,)
        self.value_grid = (*self.grid, ceil_div(e, columns))
        self.sum_grid = (self.heads * self.groups, self.value_grid[1])
        self.counts = (n, heads, self.groups)
        self.bias, self.bias_form, self.bias_stride = _bias(bias, options.chunk_size, tokens.v)
        self.product = {"s": s, "e": e, "C": options.chunk_size, "R": self.tile}
        self.product.update(S=at_least_16(s), E=columns)
        self.all = {**self.product, "causal": options.causal, "kernel": options.kernel, "BIAS": self.bias_form}
        self.all.update(LOCAL=options.local, LINEAR=options.linear)


def _bias(bias: Tensor | None, chunk_size: int, like: Tensor) -> tuple[Tensor, str, int]:
    """The bias as kernels take it: float32 numbers, "none", "vector" or "matrix", and the stride of heads."""
    if bias is None:
        return like, "none", 0
    form = "vector" if is_toeplitz(bias, chunk_size) else "matrix"
    per_head = bias.dim() == (2 if form == "vector" else 3)
    bias = bias.float().contiguous()
    return bias, form, bias.stride(0) if per_head else 0


def _sums(x: Tensor, v: Tensor, shapes: _Shapes, call: _Call, reversed_: bool) -> Tensor:
    """Σ x vᵀ before (or behind) each chunk (B H, G + 1, s, e), or, not causal, of all chunks (B H, s, e)."""
    from . import gpu_kernels as kernels

    sums = x.new_empty(shapes.heads, shapes.groups + 1, x.shape[3], v.shape[3], dtype=torch.float32)
    sums[:, 0] = 0.0
    kernels.chunk_sums[shapes.sum_grid](
        x,
        v,
        call.lengths,
        call.divisors,
        sums,
        *shapes.counts,
        *strides(x),
        *strides(v),
        **shapes.product,
        REVERSED=reversed_,
    )
    return sums.cumsum_(1) if call.options.causal else sums.sum(1)


def _forward(tokens: Tokens, bias: Tensor | None, call: _Call) -> Tensor:
    from . import gpu_kernels as kernels

    shapes = _Shapes(tokens, bias, call)
    q_quad, k_quad, q_lin, k_lin, v = tokens
    sums = _sums(k_lin, v, shapes, call, False) if call.options.linear else v
    out = v.new_empty(v.shape)
    kernels.outputs[shapes.value_grid](
        q_quad,
        k_quad,
        q_lin,
        v,
        shapes.bias,
        call.lengths,
        call.divisors,
        sums,
        out,
        *shapes.counts,
        shapes.tiles,
        shapes.bias_stride,
        *strides(q_quad),
        *strides(k_quad),
        *strides(q_lin),
        *strides(v),
        **shapes.all,
    )
    return out


def _backward(
    tokens: Tokens, bias: Tensor | None, call: _Call, grad_out: Tensor, needs_bias: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the five inputs and, if ``needs_bias``, of the bias."""
    from . import gpu_kernels as kernels

    shapes, local, linear = _Shapes(tokens, bias, call), call.options.local, call.options.linear
    q_quad, k_quad, q_lin, k_lin, v = tokens
    sums = _sums(k_lin, v, shapes, call, False) if linear else v
    reversed_sums = _sums(q_lin, grad_out, shapes, call, True) if linear else v
    # A term that is left out gives its inputs no gradient.
    grads = [x.new_empty(x.shape) if used else None for x, used in zip(tokens, (local, local, linear, linear, True))]
    grad_q_quad, grad_k_quad, grad_q_lin, grad_k_lin, grad_v = (v if x is None else x for x in grads)
    grad_scores = v
    if needs_bias:
        grad_scores = v.new_zeros(shapes.heads, shapes.groups, shapes.size, shapes.size, dtype=torch.float32)
    few = _Shapes(tokens, bias, call, most_rows=32)  # these two kernels need more registers for each
    quad_strides, value_strides = (*strides(q_quad), *strides(k_quad)), (*strides(v), *strides(grad_out))
    kernels.queries_backward[few.grid](
        q_quad,
        k_quad,
        v,
        grad_out,
        few.bias,
        call.lengths,
        call.divisors,
        sums,
        grad_q_quad,
        grad_q_lin,
        grad_scores,
        *few.counts,
        few.tiles,
        shapes.size,
        few.bias_stride,
        *quad_strides,
        *value_strides,
        **few.all,
        OF_BIAS=needs_bias and local,
    )
    kernels.keys_backward[few.grid](
        q_quad,
        k_quad,
        v,
        grad_out,
        few.bias,
        call.lengths,
        reversed_sums,
        grad_k_quad,
        grad_k_lin,
        *few.counts,
        few.tiles,
        few.bias_stride,
        *quad_strides,
        *value_strides,
        **few.all,
    )
    kernels.values_backward[shapes.value_grid](
        q_quad,
        k_quad,
        k_lin,
        grad_out,
        shapes.bias,
        call.lengths,
        reversed_sums,
        grad_v,
        *shapes.counts,
        shapes.tiles,
        shapes.bias_stride,
        *quad_strides,
        *strides(k_lin),
        *strides(grad_out),
        **shapes.all,
    )
    return (*grads, _bias_gradient(bias, grad_scores, tokens.v.shape[1], call) if needs_bias and local else None)


def _bias_gradient(bias: Tensor, grad_scores: Tensor, heads: int, call: _Call) -> Tensor:
    """The gradient of a bias of any form from that of the scores (B H, G, size, size)."""
    size = grad_scores.shape[-1]
    total = grad_scores.view(-1, heads, *grad_scores.shape[1:]).sum((0, 2))  # (H, size, size)
    with torch.enable_grad():
        leaf = bias.detach().float().requires_grad_()
        per_head = bias_rows(leaf, call.options.chunk_size, 0, size, size).expand_as(total)
        return torch.autograd.grad(per_head, leaf, total)[0].to(bias.dtype)
