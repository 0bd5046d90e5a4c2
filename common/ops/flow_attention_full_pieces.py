"""Flow-Attention of all sinks with all sources in pieces that stay in a CPU's caches, keeping nothing large.

Between the passes nothing is kept but inputs and output, which exist anyway, and vectors of one number per token; the
features are made again. A piece is some heads of some rows, all of their tokens. Legend: ``flow_attention``.
"""

import itertools
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .chunks import autocast_off, compute_dtype, zero_padding
from .eager import runs_eagerly
from .flow_attention_full import FullFlow, flow_attention_scriptable, full_context, full_flow, sink_weights
from .flow_attention_full_backward import full_backward
from .flow_options import FlowOptions
from .freed_memory import keep_freed_memory

# Numbers of one tensor that go through at once on a CPU, for each thread: 1 MiB of float32.
_PIECE = 2**18
# Up to here sums over channels are faster where not these but tokens follow each other in memory.
_FEW_CHANNELS = 16

_Mask = Optional[Tensor]


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: _Mask, query_padding_mask: _Mask, options: FlowOptions
) -> Tensor:
    """``flow_attention`` with ``causal=False``; arguments are not checked.

    O(n d e) time, and O(n) memory per head besides inputs, output and gradients.
    """
    if not runs_eagerly(q, k, v):
        return flow_attention_scriptable(q, k, v, key_padding_mask, query_padding_mask, options)
    if q.device.type == "cpu":
        keep_freed_memory()
    return _InPieces.apply(q, k, v, key_padding_mask, query_padding_mask, options)


class _InPieces(torch.autograd.Function):
    """Both passes; masks and options have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: _Mask, query_mask: _Mask, options: FlowOptions
    ) -> Tensor:
        dtype, size = compute_dtype(q), _piece_size(q, k, v)
        out = _empty_output(q, v)
        kept: List[Tensor] = []
        for (q_piece, k_piece, v_piece, out_piece), masks in _pieces(size, (q, k, v, out), (key_mask, query_mask)):
            flow = full_flow(_dense(q_piece, dtype), _dense(k_piece, dtype), *masks, options)
            context = full_context(flow, zero_padding(_dense(v_piece, dtype), masks[0]))
            torch.mul(flow.q @ context, sink_weights(flow), out=out_piece)
            kept += [*flow[2:], context]
        ctx.options, ctx.size = options, size
        ctx.save_for_backward(q, k, v, key_mask, query_mask, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Tuple[Optional[Tensor], ...]:
        q, k, v, key_mask, query_mask, out, *kept = ctx.saved_tensors
        with autocast_off(q):
            # A graph for derivatives of the gradients, and for batches of gradients (is_grads_batched).
            if torch.is_grad_enabled() or not runs_eagerly(grad_out):
                wanted = ctx.needs_input_grad[:3]
                return (*_differentiable((q, k, v), wanted, key_mask, query_mask, ctx.options, grad_out), *[None] * 3)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            dtype, each = compute_dtype(q), len(FullFlow._fields) - 1
            pieces = _pieces(ctx.size, (grad_out, out, q, k, v, *grads), (key_mask, query_mask))
            for i, ((grad_piece, out_piece, *inputs, dq, dk, dv), masks) in enumerate(pieces):
                dense = [_dense(x, dtype) for x in (grad_piece, out_piece, *inputs)]
                full_backward(*dense, *masks, ctx.options, kept[each * i : each * (i + 1)], (dq, dk, dv))
        return (*grads, None, None, None)


def _differentiable(
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    key_mask: _Mask,
    query_mask: _Mask,
    options: FlowOptions,
    grad_out: Tensor,
) -> List[Optional[Tensor]]:
    """The gradients by way of the graph, which has derivatives of its own."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        out = flow_attention_scriptable(*inputs, key_mask, query_mask, options)
    given = [x for x, wants in zip(inputs, wanted) if wants]
    found = iter(torch.autograd.grad(out, given, grad_out, create_graph=create_graph))
    return [next(found) if wants else None for wants in wanted]


def _empty_output(q: Tensor, v: Tensor) -> Tensor:
    """(B, H, n, e), ordered in memory as q if it can be: a host that splits heads without a copy joins them so too."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=v.dtype)
    return v.new_empty(*q.shape[:3], v.shape[-1])


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (B, H, n, d) in one block of memory, heads outermost, and tokens innermost where channels are few."""
    if x.shape[-1] > _FEW_CHANNELS:
        return x.to(dtype).contiguous()
    return x.to(dtype).transpose(-2, -1).contiguous().transpose(-2, -1)


def _piece_size(q: Tensor, k: Tensor, v: Tensor) -> Tuple[int, int]:
    """Rows of the batch, and heads, that go through at once."""
    batch, heads = max(q.shape[0], 1), max(q.shape[1], 1)
    if q.device.type != "cpu":
        return batch, heads
    numbers = _PIECE * torch.get_num_threads()
    fitting = max(numbers // (max(q.shape[2], k.shape[2]) * max(q.shape[3], v.shape[3])), 1)
    return (1, fitting) if fitting < heads else (fitting // heads, heads)


def _pieces(
    size: Tuple[int, int], tensors: Sequence[Tensor], masks: Sequence[_Mask]
) -> Iterator[Tuple[Tuple[Tensor, ...], Tuple[_Mask, ...]]]:
    """Tensors (B, H, ...) and masks (B, tokens) piece by piece."""
    rows, heads = size
    repeats = -(-tensors[0].shape[1] // heads)  # pieces with the same rows
    of_tensors = [[piece for part in x.split(rows) for piece in part.split(heads, dim=1)] for x in tensors]
    of_masks = [
        itertools.repeat(None) if mask is None else [part for part in mask.split(rows) for _ in range(repeats)]
        for mask in masks
    ]
    return zip(zip(*of_tensors), zip(*of_masks))
