"""Causal sums of linear attention token by token: prefix sums of outer products, as in Performer.

``feature_sums.causal_sums`` computes the same as products of matrices, chunk by chunk. FLASH compares the two in its
Table 11, as Performer and Performer-Matmul.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.autograd import graph_gradients
from ..shared.chunks import CHUNK_SIZE
from ..shared.feature_sums import causal_sums
from ..shared.precision import autocast_off
from ..shared.state import State
from ..shared.tracing import runs_eagerly


def scanned_sums(q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, Tensor, State]:
    """Σ_(j <= i) (q_i·k_j) v_j (B, H, n, e), Σ_(j <= i) q_i·k_j (B, H, n, 1), and the state; as ``causal_sums``.

    q, k (B, H, n, f), v (B, H, n, e), all float32 or all float64. O(n f e) time in n sequential steps, and
    O(n (f + e) + f e) memory: the backward pass recomputes the sums. Tracing (torch.compile, export) sees
    ``causal_sums``.
    """
    if not runs_eagerly(q, k, v):
        return causal_sums(q, k, v, CHUNK_SIZE, state)
    batch, heads, n, e = v.shape
    # The sum of the weights is an additional channel of v with all values 1.
    v, initial = F.pad(v, (0, 1), value=1.0), _joined(k, v, state)
    rows = [x.flatten(0, 1).transpose(0, 1).contiguous() for x in (q, k, v)]  # (n, B H, channels)
    out, sums = _Scan.apply(*rows, initial)
    out = out.transpose(0, 1).reshape(batch, heads, n, e + 1)
    sums = sums.unflatten(0, (batch, heads))  # (B, H, f, e + 1)
    return out[..., :e], out[..., e:], {"sum_k": sums[..., e], "sum_kv": sums[..., :e]}


def _joined(k: Tensor, v: Tensor, state: State | None) -> Tensor:
    """The initial sums, (B H, f, e + 1)."""
    if state is None:
        return k.new_zeros(k.shape[:2].numel(), k.shape[3], v.shape[3] + 1)
    return torch.cat([state["sum_kv"], state["sum_k"].unsqueeze(-1)], dim=-1).flatten(0, 1)


class _Scan(torch.autograd.Function):
    """q_i S_i with S_i = S_(i-1) + k_i v_iᵀ, and the last S: q, k (n, N, f), v (n, N, e), S (N, f, e)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, initial)
        out, sums = torch.empty_like(v), initial.clone()
        for q_i, k_i, v_i, out_i in zip(q, k, v, out):
            sums.baddbmm_(k_i.unsqueeze(2), v_i.unsqueeze(1))
            torch.bmm(q_i.unsqueeze(1), sums, out=out_i.unsqueeze(1))
        return out, sums

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, initial = ctx.saved_tensors
        with autocast_off(q):  # that of the forward pass does not apply here
            if torch.is_grad_enabled() or not runs_eagerly(grad_out, grad_sums):
                return tuple(graph_gradients(_in_graph, (q, k, v, initial), (grad_out, grad_sums)))
            return _gradients(q, k, v, initial, grad_out, grad_sums)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor, grad_out: Tensor, grad_sums: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, from recomputed sums, and of k, v and ``initial``, from sums over later tokens."""
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    grad_out, sums = grad_out.contiguous(), initial.clone()
    for k_i, v_i, grad_i, grad_q_i in zip(k, v, grad_out, grad_q):
        sums.baddbmm_(k_i.unsqueeze(2), v_i.unsqueeze(1))
        torch.bmm(sums, grad_i.unsqueeze(2), out=grad_q_i.unsqueeze(2))
    sums = grad_sums.clone()  # gradient from all readers of the sum after token i
    for i in reversed(range(len(q))):
        sums.baddbmm_(q[i].unsqueeze(2), grad_out[i].unsqueeze(1))
        torch.bmm(sums, v[i].unsqueeze(2), out=grad_k[i].unsqueeze(2))
        torch.bmm(k[i].unsqueeze(1), sums, out=grad_v[i].unsqueeze(1))
    return grad_q, grad_k, grad_v, sums


def _in_graph(q: Tensor, k: Tensor, v: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """``_Scan`` in differentiable PyTorch functions."""
    tokens = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, N, n, channels)
    state = {"sum_kv": initial.unsqueeze(0), "sum_k": initial.new_zeros(1, *initial.shape[:2])}
    values, _, after = causal_sums(*tokens, CHUNK_SIZE, state)
    return values.squeeze(0).transpose(0, 1), after["sum_kv"].squeeze(0)
