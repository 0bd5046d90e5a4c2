"""Flow-Attention of all sinks with all sources in plain PyTorch, with a hand-written backward pass.

Saved for the backward pass are the inputs and the output, which exist anyway, and vectors of one number per token;
features are recomputed.
"""

from typing import Any

import torch
from torch import Tensor

from ..shared.autograd import graph_gradients
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.tracing import runs_eagerly
from .full import flow_attention_in_graph, full_context, full_flow, sink_weights
from .full_backward import full_backward
from .options import FlowOptions

# Up to this many channels, sums over channels are faster where the tokens, not the channels, are adjacent in memory.
_FEW_CHANNELS = 16

_Mask = Tensor | None


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: _Mask, query_padding_mask: _Mask, options: FlowOptions
) -> Tensor:
    """``flow_attention`` with ``causal=False``, where nothing traces; arguments are not checked.

    O(n d e) time; O(n) memory per head is kept in addition to inputs, output and gradients.
    """
    return _Full.apply(q, k, v, key_padding_mask, query_padding_mask, options)


class _Full(torch.autograd.Function):
    """Both passes; masks and options have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: _Mask, query_mask: _Mask, options: FlowOptions
    ) -> Tensor:
        dtype, out = compute_dtype(q), _empty_output(q, v)
        flow = full_flow(_dense(q, dtype), _dense(k, dtype), key_mask, query_mask, options)
        context = full_context(flow, zero_padding(_dense(v, dtype), key_mask))
        torch.mul(flow.q @ context, sink_weights(flow), out=out)
        ctx.options = options
        ctx.save_for_backward(q, k, v, key_mask, query_mask, out, *flow[2:], context)
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
            dense = [_dense(x, compute_dtype(q)) for x in (grad_out, out, q, k, v)]
            full_backward(*dense, key_mask, query_mask, ctx.options, saved, tuple(grads))
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
