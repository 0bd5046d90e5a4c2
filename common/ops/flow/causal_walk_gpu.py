"""Causal Flow-Attention by Triton kernels that walk through a sequence, the host's side: Flowformer, Algorithm 2.

One program for each head of each sequence. q, k and v are read once forward, in one launch, and twice backward, in two;
nothing else of size (n, d) is written or read but outputs and gradients, and no PyTorch operation stands between. For
the backward pass inputs, output, flows and the sums of features before each tile are kept.

The kernels' file imports Triton, so it is imported where they are launched: on most machines there is none.
"""

import torch
from torch import Tensor

from ..shared.gpu.launch import at_least_16, ceil_div, rows, strides
from ..shared.state import State
from .causal import STATE_SUMS, CausalInputs, state_shapes
from .causal_gpu_call import Call

#: The walk, when it fails.
NAME = "flow_attention_walk"

#: Most channels of q and of v. With more, the sum of kᵀ(w v) leaves too few registers for products.
MAX_CHANNELS = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}

#: Sums of a state in the order of the kernels.
_VECTORS = ("sum_q", "sum_k", "sum_q_over_incoming", "sum_k_over_outgoing")
_LOGS = ("log_competition", "log_allocation")


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether there is a walk for so many channels of q (B, H, n, d) and v (B, H, n, e)."""
    return max(q.shape[3], v.shape[3]) <= MAX_CHANNELS[q.dtype]


def tile_rows(q: Tensor, channels: int) -> int:
    """Tokens of a tile, whose features and scores must be in registers at once: see ``compiled.md``."""
    few = q.dtype == torch.float32 or (q.dtype == torch.float16 and channels > 32)
    return 16 if few else 32


def start(inputs: CausalInputs) -> tuple[State | None, None]:
    """The state before the first token, None for one without any; positions are counted in the kernels."""
    return inputs.state, None


class _Shapes:
    """The arguments that every kernel takes."""

    def __init__(self, q: Tensor, v: Tensor, call: Call) -> None:
        batch, heads, n, d = q.shape
        e = v.shape[3]
        size = tile_rows(q, max(d, e))
        self.heads, self.tiles, self.size = batch * heads, ceil_div(n, size), size
        self.grid = (self.heads,)
        self.counts = (n, heads, self.tiles)
        self.padding = q if call.padding is None else call.padding.contiguous().view(torch.uint8)
        self.eps, self.outer_eps = call.options.form.eps, call.options.form.outer_eps
        self.sizes = {"d": d, "e": e, "phi": call.options.phi, "PADDED": call.padding is not None}
        self.sizes.update(C=size, D=at_least_16(d), E=at_least_16(e))
        self.kinds = {"COMPETITION": call.options.competition, "ALLOCATION": call.options.allocation}


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
) -> tuple[Tensor, tuple[Tensor, ...], State]:
    """The output, what ``backward`` needs besides it, and the state after the tokens."""
    from . import causal_walk_gpu_kernels as kernels

    q, k, v = rows(q), rows(k), rows(v)
    shapes = _Shapes(q, v, call)
    out = v.new_empty(v.shape)
    numbers = {"dtype": torch.float32, "device": q.device}
    flows, tile_sums, carried = (
        torch.empty(shapes.heads, shapes.tiles, *size, **numbers) for size in ((4, shapes.size), (4, q.shape[3]), (5,))
    )
    after = {name: torch.empty(shape, **numbers) for name, shape in state_shapes(q, v).items()}
    after["count"] = torch.empty(q.shape[0], dtype=torch.int64, device=q.device)
    kernels.outputs[shapes.grid](
        q,
        k,
        v,
        shapes.padding,
        after["count"] if state is None else state["count"].contiguous(),
        *_joined(state, flows),
        out,
        flows,
        tile_sums,
        carried,
        *(after[name] for name in ("count", *_VECTORS, *_LOGS, "sum_kv")),
        *shapes.counts,
        shapes.eps,
        shapes.outer_eps,
        call.options.clamp,
        *strides(q),
        *strides(k),
        *strides(v),
        **shapes.sizes,
        **shapes.kinds,
        STATE=state is not None,
    )
    return out, (flows, tile_sums, carried), after


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    state: State | None,
    kept: tuple[Tensor, ...],
    out: Tensor,
    grad_out: Tensor,
    grad_state: State | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and of the sums of ``state``."""
    from . import causal_walk_gpu_kernels as kernels

    q, k, v, grad_out = rows(q), rows(k), rows(v), rows(grad_out)
    shapes, (flows, tile_sums, carried) = _Shapes(q, v, call), kept
    every_stride = (*strides(q), *strides(k), *strides(v), *strides(grad_out))
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    numbers = flows.new_empty(shapes.heads, shapes.tiles, 8, shapes.size)
    sums_behind = flows.new_empty(shapes.heads, shapes.tiles, 2, q.shape[3])
    grad_first = (flows, flows, flows)  # written to only if there was a state
    if state is not None:
        leading, d, e = q.shape[:2], q.shape[3], v.shape[3]
        grad_first = tuple(flows.new_empty(*leading, *shape) for shape in ((4, d), (2,), (d, e)))
    kernels.sources_backward[shapes.grid](
        q,
        k,
        v,
        out,
        grad_out,
        shapes.padding,
        flows,
        tile_sums,
        carried,
        *_joined(grad_state, flows),
        grad_k,
        grad_v,
        numbers,
        sums_behind,
        *grad_first,
        *shapes.counts,
        shapes.eps,
        call.options.clamp,
        *every_stride,
        **shapes.sizes,
        **shapes.kinds,
        STATE=state is not None,
        GIVEN=grad_state is not None,
    )
    kernels.sinks_backward[shapes.grid](
        q,
        k,
        v,
        grad_out,
        shapes.padding,
        numbers,
        tile_sums,
        sums_behind,
        flows if state is None else state["sum_kv"].contiguous(),
        grad_q,
        *shapes.counts,
        shapes.eps,
        *every_stride,
        **shapes.sizes,
        STATE=state is not None,
    )
    if state is None:
        return (grad_q, grad_k, grad_v, *[None] * len(STATE_SUMS))
    vectors, logs, grad_kv = grad_first
    grads = {**dict(zip(_VECTORS, vectors.unbind(2))), **dict(zip(_LOGS, logs.unbind(2))), "sum_kv": grad_kv}
    return (grad_q, grad_k, grad_v, *(grads[name] for name in STATE_SUMS))


def _joined(state: State | None, absent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of a state, or their gradients, as kernels take them: vectors (B, H, 4, d), logarithms, Σ kᵀ(w v)."""
    if state is None:
        return absent, absent, absent
    vectors, logs = (torch.stack([state[name] for name in names], 2) for names in (_VECTORS, _LOGS))
    return vectors, logs, state["sum_kv"].contiguous()
