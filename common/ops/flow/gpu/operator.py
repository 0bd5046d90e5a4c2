"""Causal Flow-Attention by kernels as an operator of torch.compile."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...shared.gpu import dispatch
from ...shared.gpu.operators import differentiable_operator
from ...shared.state import State
from ..causal import STATE_SUMS, CausalInputs, attention_in_chunks, chunk_positions, empty_state, state_shapes
from ..options import FlowForm, FlowOptions
from . import causal


def guarded_attention(inputs: CausalInputs) -> tuple[Tensor, State]:
    """Kernels, or plain PyTorch if they fail."""
    kernels, fallback = partial(causal.causal_attention, inputs), partial(attention_in_chunks, inputs)
    return dispatch.guarded(causal.NAME, kernels, fallback, causal.first_use(inputs))


def causal_attention(inputs: CausalInputs) -> tuple[Tensor, State]:
    """``guarded_attention`` as one operator."""
    q, k, v, padding, options, chunk_size, state = inputs
    earlier = empty_state(q, v) if state is None else state
    form = options.form
    constants = (form.eps, form.outer_eps, form.rescale, min(options.clamp, _NO_CLAMP), *options[2:], chunk_size)
    sums = (earlier[name] for name in STATE_SUMS)
    out, *sums = _attend(q, k, v, padding, earlier["count"], *sums, *constants)
    total = chunk_positions(q, padding, q.shape[2], earlier).total
    return out, {"count": total, **dict(zip(STATE_SUMS, sums))}


#: Value for no clamp: an operator does not accept infinite numbers.
_NO_CLAMP = 1e30


def _run(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, count: Tensor, *rest: Any) -> Sequence[Tensor]:
    sums, (*form, clamp, phi, competition, allocation, chunk_size) = rest[: len(STATE_SUMS)], rest[len(STATE_SUMS) :]
    clamp = float("inf") if clamp >= _NO_CLAMP else clamp
    options = FlowOptions(FlowForm(*form), clamp, phi, competition, allocation)
    state = {"count": count, **dict(zip(STATE_SUMS, sums))}
    out, state = guarded_attention(CausalInputs(q, k, v, padding, options, chunk_size, state))
    # Clones: some sums may be the inputs.
    return out.to(v.dtype).contiguous(), *(state[name].clone() for name in STATE_SUMS)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = state_shapes(q, v)
    return v.new_empty(v.shape), *(q.new_empty(shapes[name], dtype=torch.float32) for name in STATE_SUMS)


_attend = differentiable_operator(
    "causal_flow_attention",
    ("q", "k", "v", "padding?", "count", *STATE_SUMS),
    "float eps, float outer_eps, bool rescale, float clamp, str phi, str competition, str allocation, int chunk_size",
    1 + len(STATE_SUMS),
    _run,
    _fake,
)
