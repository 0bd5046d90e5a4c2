"""Flow-Attention of all sinks with all sources in blocks that fit a CPU's caches, with a hand-written backward pass.

Saved for the backward pass are the inputs and the output, which exist anyway, and vectors of one number per token;
features are recomputed. A block is some heads of some rows of the batch with all of their tokens, or all heads if these
compete.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..shared.autograd import graph_gradients
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.tracing import runs_eagerly
from .full import FullFlow, flow_attention_in_graph, full_context, full_flow, sink_weights
from .full_backward import full_backward
from .options import FlowOptions

#: Numbers of one tensor in a block on a CPU, for each thread: 1 MiB of float32.
BLOCK_NUMBERS = 2**18
# Up to this many channels, sums over channels are faster where the tokens, not the channels, are adjacent in memory.
_FEW_CHANNELS = 16

_Mask = Tensor | None


def full_attention_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: _Mask, query_padding_mask: _Mask, options: FlowOptions
) -> Tensor:
    """``flow_attention`` with ``causal=False``; arguments are not checked. Other devices than CPUs use one block.

    O(n d e) time, and O(n) memory per head in addition to inputs, output and gradients.
    """
    return _InBlocks.apply(q, k, v, key_padding_mask, query_padding_mask, options)


class _InBlocks(torch.autograd.Function):
    """Both passes; masks and options have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: _Mask, query_mask: _Mask, options: FlowOptions
    ) -> Tensor:
        dtype, size = compute_dtype(q), _block_size(q, k, v, options)
        out = _empty_output(q, v)
        saved: list[Tensor] = []
        for (q_block, k_block, v_block, out_block), masks in _blocks(size, (q, k, v, out), (key_mask, query_mask)):
            flow = full_flow(_dense(q_block, dtype), _dense(k_block, dtype), *masks, options)
            context = full_context(flow, zero_padding(_dense(v_block, dtype), masks[0]))
            torch.mul(flow.q @ context, sink_weights(flow), out=out_block)
            saved += [*flow[2:], context]
        ctx.options, ctx.size = options, size
        ctx.save_for_backward(q, k, v, key_mask, query_mask, out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, query_mask, out, *saved = ctx.saved_tensors
        with autocast_off(q):
            if torch.is_grad_enabled() or not runs_eagerly(grad_out):
                grads = graph_gradients(
                    lambda *x: flow_attention_in_graph(*x, key_mask, query_mask, ctx.options), (q, k, v), (grad_out,)
                )
                return (*grads, None, None, None)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            dtype, each = compute_dtype(q), len(FullFlow._fields) - 1
            blocks = _blocks(ctx.size, (grad_out, out, q, k, v, *grads), (key_mask, query_mask))
            for i, ((grad_block, out_block, *inputs, grad_q, grad_k, grad_v), masks) in enumerate(blocks):
                dense = [_dense(x, dtype) for x in (grad_block, out_block, *inputs)]
                block_saved = saved[each * i : each * (i + 1)]
                full_backward(*dense, *masks, ctx.options, block_saved, (grad_q, grad_k, grad_v))
        return (*grads, None, None, None)


def _empty_output(q: Tensor, v: Tensor) -> Tensor:
    """(B, H, n, e) in the memory order of q if possible, so that a host can split and join heads without a copy."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=v.dtype)
    return v.new_empty(*q.shape[:3], v.shape[-1])


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B, H, n, d) in one block of memory, heads outermost, and tokens innermost where channels are few."""
    if x.shape[-1] > _FEW_CHANNELS:
        return x.to(dtype).contiguous()
    return x.to(dtype).transpose(-2, -1).contiguous().transpose(-2, -1)


def _block_size(q: Tensor, k: Tensor, v: Tensor, options: FlowOptions) -> tuple[int, int]:
    """The numbers of rows of the batch and of heads of a block."""
    batch, heads = max(q.shape[0], 1), max(q.shape[1], 1)
    if q.device.type != "cpu":
        return batch, heads
    numbers = BLOCK_NUMBERS * torch.get_num_threads()
    fitting = max(numbers // (max(q.shape[2], k.shape[2]) * max(q.shape[3], v.shape[3])), 1)
    if fitting < heads:
        return 1, heads if options.competition == "softmax_heads" else fitting
    # Half of what fits if that is several rows: takes 0.8 times as long at 196 tokens.
    return max(fitting // (2 * heads), 1), heads


def _blocks(
    size: tuple[int, int], tensors: Sequence[Tensor], masks: Sequence[_Mask]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[_Mask, ...]]]:
    """Tensors (B, H, ...) and masks (B, tokens), block by block."""
    rows, heads = size
    repeats = -(-tensors[0].shape[1] // heads)  # blocks that share their rows, and so their masks
    tensor_blocks = [[block for part in x.split(rows) for block in part.split(heads, dim=1)] for x in tensors]
    mask_blocks = [
        itertools.repeat(None) if mask is None else [part for part in mask.split(rows) for _ in range(repeats)]
        for mask in masks
    ]
    return zip(zip(*tensor_blocks), zip(*mask_blocks))
