"""Mixed chunk attention of a whole sequence by kernels: FLASH (ICML 2022), equations 7 and 8.

Legend: ``mixed_chunk_attention``. Scores are made anew for each block of channels of v and in the backward pass. Beyond
inputs and outputs there are the (n / C) s e numbers of the sums over chunks, and n C for a bias that wants a gradient.
"""

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..alignment import put_back, real_first, take
from ..mixed_chunk_attention import _Options, _Tokens
from ..mixed_chunk_attention import whole_sequence as by_pytorch_form
from ..relative_bias import bias_rows, is_toeplitz
from . import mixed_chunk_attention_kernels as kernels
from .dispatch import guarded, interpreted
from .launch import at_least_16, ceil_div, on_device_of, precision, rows, strides

NAME = "mixed_chunk_attention"
# Bytes of shared memory a device needs to hold tiles of 64 tokens and 128 channels: A100 and H100 have more.
_LARGE_MEMORY = 128 * 1024


class _Call(NamedTuple):
    """What is no tensor with a gradient."""

    lengths: Tensor  # real tokens (B,), int32
    divisors: Tensor  # of the products across chunks (B,), float32
    padding: Optional[Tensor]  # the same real tokens as a mask (B, n), True = padding, behind them
    options: _Options


def whole_sequence(tokens: _Tokens, options: _Options, padding_mask: Optional[Tensor]) -> Tensor:
    """Arguments of the PyTorch form's ``whole_sequence``: q_quad, k_quad, q_lin, k_lin (B, H, n, s), v (B, H, n, e).

    -> (B, H, n, e) in v's dtype. ``padding_mask``: bool (B, n), True = padding. float32, float16 or bfloat16, s up to
    128, relu² or Laplace. Gradients of second order are those of the PyTorch form. Cost as there.
    """
    order, n = real_first(padding_mask), tokens.v.shape[2]
    tokens = [take(x, order) for x in tokens]
    if padding_mask is None:
        lengths, behind = torch.full((tokens[0].shape[0],), n, device=tokens[0].device), None
    else:
        lengths = (~padding_mask).sum(1)
        behind = torch.arange(n, device=lengths.device) >= lengths[:, None]
    divisors = torch.full_like(lengths, options.chunk_size) if options.causal else lengths.clamp(min=1)
    call = _Call(lengths.int(), divisors.float(), behind, options._replace(bias=None))
    return put_back(_MixedChunkAttention.apply(*tokens, options.bias, call), order)


class _MixedChunkAttention(torch.autograd.Function):
    """The five inputs, real tokens first, and the bias -> the output."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tokens, bias, call = arguments
        ctx.call = call
        ctx.save_for_backward(*tokens, bias)
        with on_device_of(tokens[0]):
            return _forward(_Tokens(*(rows(x) for x in tokens)), bias, call)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tuple[Optional[Tensor], ...]:
        *tokens, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:-1]

        def by_pytorch() -> Tuple[Optional[Tensor], ...]:
            return _pytorch_gradients((*tokens, bias), wanted, ctx.call, d_out)

        def by_kernels() -> Tuple[Optional[Tensor], ...]:
            with on_device_of(d_out):
                return _backward(_Tokens(*(rows(x) for x in tokens)), bias, ctx.call, rows(d_out), wanted[-1])

        # With create_graph=True the gradient must have one itself, which kernels do not give.
        found = by_pytorch() if torch.is_grad_enabled() else guarded(NAME, by_kernels, by_pytorch)
        return (*(gradient if want else None for gradient, want in zip(found, wanted)), None)


def _pytorch_gradients(
    inputs: Tuple[Optional[Tensor], ...], wanted: Tuple[bool, ...], call: _Call, d_out: Tensor
) -> Tuple[Optional[Tensor], ...]:
    """The gradients of the PyTorch form, recomputed."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        if not again:
            inputs = tuple(None if x is None else x.detach().requires_grad_(w) for x, w in zip(inputs, wanted))
        *tokens, bias = inputs
        out = by_pytorch_form(_Tokens(*tokens), call.options._replace(bias=bias), call.padding)
        leaves = [x for x, want in zip(inputs, wanted) if want]
        found = iter(torch.autograd.grad(out.to(d_out.dtype), leaves, d_out, create_graph=again, allow_unused=True))
    return tuple(next(found) if want else None for want in wanted)


class _Shapes:
    """Arguments that every kernel takes, and how programs are laid out."""

    def __init__(self, tokens: _Tokens, bias: Optional[Tensor], call: _Call) -> None:
        options, (batch, heads, n, s), e = call.options, tokens.q_quad.shape, tokens.v.shape[3]
        tile = _tile_rows(tokens.v, s)
        self.size = min(options.chunk_size, n)  # of a chunk, as far as there are tokens
        self.tile = min(tile, at_least_16(self.size))
        self.heads, self.groups, self.blocks = batch * heads, ceil_div(n, options.chunk_size), ceil_div(self.size, tile)
        columns = min(64 if tile >= 64 else 32, at_least_16(e))
        self.grid = (self.heads * self.groups * self.blocks,)
        self.value_grid = (*self.grid, ceil_div(e, columns))
        self.sum_grid = (self.heads * self.groups, self.value_grid[1])
        self.counts = (n, heads, self.groups)
        self.bias, self.bias_form, self.bias_stride = _bias(bias, options.chunk_size, tokens.v)
        self.product = {"s": s, "e": e, "precision": precision(tokens.v), "C": options.chunk_size, "R": self.tile}
        self.product.update(S=at_least_16(s), E=columns)
        self.all = {**self.product, "causal": options.causal, "kernel": options.kernel, "BIAS": self.bias_form}
        self.all.update(LOCAL=options.local, LINEAR=options.linear)


def _tile_rows(x: Tensor, channels: int) -> int:
    """Tokens of a tile: 64 where they fit the device; few in the interpreter, so that little inputs have several."""
    if interpreted():
        return 16
    large = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin >= _LARGE_MEMORY
    return 64 if channels <= 64 or large else 32


def _bias(bias: Optional[Tensor], chunk_size: int, like: Tensor) -> Tuple[Tensor, str, int]:
    """What kernels take of a bias: float32 numbers, "none", "vector" or "matrix", and the stride of heads."""
    if bias is None:
        return like, "none", 0
    form = "vector" if is_toeplitz(bias, chunk_size) else "matrix"
    of_heads = bias.dim() == (2 if form == "vector" else 3)
    bias = bias.float().contiguous()
    return bias, form, bias.stride(0) if of_heads else 0


def _sums(x: Tensor, v: Tensor, shapes: _Shapes, call: _Call, reversed_: bool) -> Tensor:
    """Σ x vᵀ before (or behind) each chunk (B H, G + 1, s, e), or, not causal, of all chunks (B H, s, e)."""
    sums = x.new_empty(shapes.heads, shapes.groups + 1, x.shape[3], v.shape[3], dtype=torch.float32)
    sums[:, 0] = 0.0
    kernels.chunk_sums[shapes.sum_grid](
        x, v, call.lengths, call.divisors, sums, *shapes.counts, *strides(x), *strides(v), **shapes.product,
        REVERSED=reversed_,
    )  # fmt: skip
    return sums.cumsum_(1) if call.options.causal else sums.sum(1)


def _forward(tokens: _Tokens, bias: Optional[Tensor], call: _Call) -> Tensor:
    shapes = _Shapes(tokens, bias, call)
    q_quad, k_quad, q_lin, k_lin, v = tokens
    sums = _sums(k_lin, v, shapes, call, False) if call.options.linear else v
    out = v.new_empty(v.shape)
    kernels.outputs[shapes.value_grid](
        q_quad, k_quad, q_lin, v, shapes.bias, call.lengths, call.divisors, sums, out, *shapes.counts, shapes.blocks,
        shapes.bias_stride, *strides(q_quad), *strides(k_quad), *strides(q_lin), *strides(v), **shapes.all,
    )  # fmt: skip
    return out


def _backward(
    tokens: _Tokens, bias: Optional[Tensor], call: _Call, d_out: Tensor, of_bias: bool
) -> Tuple[Optional[Tensor], ...]:
    """Gradients of the five inputs and, if wanted, of the bias."""
    shapes, local, linear = _Shapes(tokens, bias, call), call.options.local, call.options.linear
    q_quad, k_quad, q_lin, k_lin, v = tokens
    sums = _sums(k_lin, v, shapes, call, False) if linear else v
    reversed_sums = _sums(q_lin, d_out, shapes, call, True) if linear else v
    # A term that is left out gives its inputs no gradient.
    made = [x.new_empty(x.shape) if used else None for x, used in zip(tokens, (local, local, linear, linear, True))]
    d_q_quad, d_k_quad, d_q_lin, d_k_lin, d_v = (v if x is None else x for x in made)
    d_scores = v
    if of_bias:
        d_scores = v.new_zeros(shapes.heads, shapes.groups, shapes.size, shapes.size, dtype=torch.float32)
    of_quad, of_values = (*strides(q_quad), *strides(k_quad)), (*strides(v), *strides(d_out))
    kernels.queries_backward[shapes.grid](
        q_quad, k_quad, v, d_out, shapes.bias, call.lengths, call.divisors, sums, d_q_quad, d_q_lin, d_scores,
        *shapes.counts, shapes.blocks, shapes.size, shapes.bias_stride, *of_quad, *of_values, **shapes.all,
        OF_BIAS=of_bias and local,
    )  # fmt: skip
    kernels.keys_backward[shapes.grid](
        q_quad, k_quad, v, d_out, shapes.bias, call.lengths, reversed_sums, d_k_quad, d_k_lin,
        *shapes.counts, shapes.blocks, shapes.bias_stride, *of_quad, *of_values, **shapes.all,
    )  # fmt: skip
    kernels.values_backward[shapes.value_grid](
        q_quad, k_quad, k_lin, d_out, shapes.bias, call.lengths, reversed_sums, d_v,
        *shapes.counts, shapes.blocks, shapes.bias_stride, *of_quad, *strides(k_lin), *strides(d_out), **shapes.all,
    )  # fmt: skip
    return (*made, _bias_gradient(bias, d_scores, tokens.v.shape[1], call) if of_bias and local else None)


def _bias_gradient(bias: Tensor, d_scores: Tensor, heads: int, call: _Call) -> Tensor:
    """The gradient of a bias of any form from that of the scores (B H, G, size, size)."""
    size = d_scores.shape[-1]
    total = d_scores.view(-1, heads, *d_scores.shape[1:]).sum((0, 2))  # (H, size, size)
    with torch.enable_grad():
        leaf = bias.detach().float().requires_grad_()
        of_heads = bias_rows(leaf, call.options.chunk_size, 0, size, size).expand_as(total)
        return torch.autograd.grad(of_heads, leaf, total)[0].to(bias.dtype)
