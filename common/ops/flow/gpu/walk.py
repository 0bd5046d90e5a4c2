"""Causal Flow-Attention by Triton kernels that walk through a sequence, the host's side: Flowformer, Algorithm 2.

One program for each head of each sequence. q, k and v are read once forward, in one launch, and twice backward, in two;
nothing else of size (n, d) is written or read but outputs and gradients, and no PyTorch operation stands between. For
the backward pass inputs, output, flows and the sums of features before each tile are kept.

The kernels' file imports Triton, so it is imported where they are launched: on most machines there is none.
"""

import torch
from torch import Tensor

from ...shared.gpu.launch import at_least_16, ceil_div, rows, strides
from ...shared.state import State
from ..causal import STATE_SUMS, CausalInputs, state_shapes

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


class _Walk:
    """q, k and v as kernels take them, and the arguments that every kernel takes."""

    def __init__(self, inputs: CausalInputs) -> None:
        self.q, self.k, self.v = rows(inputs.q), rows(inputs.k), rows(inputs.v)
        (batch, heads, n, d), e, options = self.q.shape, self.v.shape[3], inputs.options
        size = tile_rows(self.q, max(d, e))
        self.heads, self.tiles, self.size = batch * heads, ceil_div(n, size), size
        self.grid = (self.heads,)
        self.counts = (n, heads, self.tiles)
        self.strides = (*strides(self.q), *strides(self.k), *strides(self.v))
        self.padding = self.q if inputs.padding is None else inputs.padding.contiguous().view(torch.uint8)
        self.eps, self.outer_eps, self.clamp = options.form.eps, options.form.outer_eps, options.clamp
        self.sizes = {"d": d, "e": e, "phi": options.phi, "PADDED": inputs.padding is not None}
        self.sizes.update(C=size, D=at_least_16(d), E=at_least_16(e), STATE=inputs.state is not None)
        self.kinds = {"COMPETITION": options.competition, "ALLOCATION": options.allocation}


def forward(inputs: CausalInputs, positions: None) -> tuple[Tensor, tuple[Tensor, ...], State]:
    """The output, what ``backward`` needs besides it, and the state after the tokens."""
    from . import walk_kernels as kernels

    walk, state = _Walk(inputs), inputs.state
    q, k, v = walk.q, walk.k, walk.v
    out = v.new_empty(v.shape)
    numbers = {"dtype": torch.float32, "device": q.device}
    flows, tile_sums, carried = (
        torch.empty(walk.heads, walk.tiles, *size, **numbers) for size in ((4, walk.size), (4, q.shape[3]), (5,))
    )
    after = {name: torch.empty(shape, **numbers) for name, shape in state_shapes(q, v).items()}
    after["count"] = torch.empty(q.shape[0], dtype=torch.int64, device=q.device)
    kernels.outputs[walk.grid](
        q,
        k,
        v,
        walk.padding,
        after["count"] if state is None else state["count"].contiguous(),
        *_joined(state, flows),
        out,
        flows,
        tile_sums,
        carried,
        *(after[name] for name in ("count", *_VECTORS, *_LOGS, "sum_kv")),
        *walk.counts,
        walk.eps,
        walk.outer_eps,
        walk.clamp,
        *walk.strides,
        **walk.sizes,
        **walk.kinds,
    )
    return out, (flows, tile_sums, carried), after


def backward(
    inputs: CausalInputs,
    positions: None,
    kept: tuple[Tensor, ...],
    out: Tensor,
    grad_out: Tensor,
    grad_state: State | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and of the sums of the state before the tokens."""
    walk, grad_out = _Walk(inputs), rows(grad_out)
    numbers, sums_after, grad_k, grad_v, grad_sums = _sources_backward(walk, kept, out, grad_out, grad_state)
    grad_q = _sinks_backward(walk, grad_out, numbers, kept[1], sums_after, inputs.state)
    return (grad_q, grad_k, grad_v, *grad_sums)


def _sources_backward(
    walk: _Walk, kept: tuple[Tensor, ...], out: Tensor, grad_out: Tensor, grad_state: State | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Compute inputs of ``_sinks_backward``, and gradients of k, v and of the sums of the state before the tokens."""
    from . import walk_kernels as kernels

    (flows, _, _), (q, k, v) = kept, (walk.q, walk.k, walk.v)
    (*leading, _, d), e = q.shape, v.shape[3]
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
    numbers = flows.new_empty(walk.heads, walk.tiles, 8, walk.size)
    sums_after = flows.new_empty(walk.heads, walk.tiles, 2, d)
    vectors, logs, grad_kv = flows, flows, flows  # written to only if there was a state
    if walk.sizes["STATE"]:
        vectors, logs, grad_kv = (flows.new_empty(*leading, *shape) for shape in ((4, d), (2,), (d, e)))
    kernels.sources_backward[walk.grid](
        q,
        k,
        v,
        out,
        grad_out,
        walk.padding,
        *kept,
        *_joined(grad_state, flows),
        grad_k,
        grad_v,
        numbers,
        sums_after,
        vectors,
        logs,
        grad_kv,
        *walk.counts,
        walk.eps,
        walk.clamp,
        *walk.strides,
        *strides(grad_out),
        **walk.sizes,
        **walk.kinds,
        STATE_GRADS=grad_state is not None,
    )
    if not walk.sizes["STATE"]:
        return numbers, sums_after, grad_k, grad_v, [None] * len(STATE_SUMS)
    grads = {**dict(zip(_VECTORS, vectors.unbind(2))), **dict(zip(_LOGS, logs.unbind(2))), "sum_kv": grad_kv}
    return numbers, sums_after, grad_k, grad_v, [grads[name] for name in STATE_SUMS]


def _sinks_backward(
    walk: _Walk, grad_out: Tensor, numbers: Tensor, tile_sums: Tensor, sums_after: Tensor, state: State | None
) -> Tensor:
    """The gradient of q."""
    from . import walk_kernels as kernels

    grad_q = walk.q.new_empty(walk.q.shape)
    kernels.sinks_backward[walk.grid](
        walk.q,
        walk.k,
        walk.v,
        grad_out,
        walk.padding,
        numbers,
        tile_sums,
        sums_after,
        numbers if state is None else state["sum_kv"].contiguous(),
        grad_q,
        *walk.counts,
        walk.eps,
        *walk.strides,
        *strides(grad_out),
        **walk.sizes,
    )
    return grad_q


def _joined(state: State | None, absent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of a state, or their gradients, as kernels take them: vectors (B, H, 4, d), logarithms, Σ kᵀ(w v)."""
    if state is None:
        return absent, absent, absent
    vectors, logs = (torch.stack([state[name] for name in names], 2) for names in (_VECTORS, _LOGS))
    return vectors, logs, state["sum_kv"].contiguous()
