"""A state that is passed from process to process, and its gradient, which is passed back.

Process r receives the state after the tokens of the processes before it, computes its own tokens, and sends the state
after them to process r + 1. The backward pass runs in the other direction. The results equal those of the whole
sequence in one process, and this file contains no mathematics of any mechanism. Independent rows of a batch are
pipelined, so that the processes work at the same time: with U groups of rows, for a fraction U / (U + P - 1) of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.shared.state import State, largest_states
from .group import ContextGroup, Layout, first_order_alone, layouts_of

#: ``call(tensors, padding_mask, state) -> (out, state)``: the next tokens of the rows, and the state after them.
Call = Callable[[Sequence[Tensor | None], Tensor | None, State | None], tuple[Tensor, State]]
#: Groups of rows per process: 4 P groups for P processes, if there are as many rows.
_GROUPS_PER_PROCESS = 4


def carried(
    group: ContextGroup,
    owner: Any,
    call: Call,
    tensors: Sequence[Tensor | None],
    padding_mask: Tensor | None,
) -> Tensor:
    """The outputs of ``call`` for this process's tokens, given the tokens of the processes before it in ``group``.

    ``tensors`` and the output are (B, H, n, c) or (B, H, n); ``padding_mask`` is bool (B, n), True = padding. ``owner``
    is the module that the states belong to; its states share one layout. Every process of the group must call this in
    the same order, and later the backward pass. If ``call`` draws random numbers, all groups of rows get the same ones.
    torch.compile breaks its graph here.
    """
    if group.size == 1:
        return call(tensors, padding_mask, None)[0]
    # A compiled graph cannot contain messages, and ignores `largest_states`.
    run = torch.compiler.disable(_carried) if torch.compiler.is_compiling() else _carried
    return run(group, owner, call, tensors, padding_mask)


def _carried(
    group: ContextGroup,
    owner: Any,
    call: Call,
    tensors: Sequence[Tensor | None],
    padding_mask: Tensor | None,
) -> Tensor:
    """``carried`` for more than one process."""
    rows = next(x.shape[0] for x in tensors if x is not None)
    count = groups(rows, group.size)
    outs, numbers = [], RandomNumbers(tensors) if count > 1 else None
    for i in range(count):
        if numbers is not None and i:
            numbers.restore()
        start, end = rows * i // count, rows * (i + 1) // count
        part = [_rows(x, start, end) for x in tensors] if count > 1 else tensors
        mask = _rows(padding_mask, start, end)
        layouts = state_layouts(group, owner, call, part)
        state = None if group.rank == 0 else _received(group, layouts, part)
        with largest_states():  # so that every process sends and receives the same layout
            out, after = call(part, mask, state)
        outs.append(out if group.rank == group.size - 1 else _sent(group, out, {name: after[name] for name in layouts}))
    return outs[0] if count == 1 else torch.cat(outs)


def groups(rows: int, processes: int) -> int:
    """The number of groups of rows in the pipeline: at most four per process."""
    return min(rows, _GROUPS_PER_PROCESS * processes)


def _rows(x: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if x is None else x[start:end]


def state_layouts(group: ContextGroup, owner: Any, call: Call, tensors: Sequence[Tensor | None]) -> dict[str, Layout]:
    """The layout of each entry of a full-size state, found with one padding token; the same in every process."""
    cache = group.layouts.setdefault(owner, {})
    key = tuple(None if x is None else (x.shape[:2], x.shape[3:], x.dtype, x.device) for x in tensors)
    key = (*key, torch.is_autocast_enabled(tensors[-1].device.type))
    if key not in cache:
        first = [None if x is None else x[:, :, :1].detach() for x in tensors]
        x = next(x for x in first if x is not None)
        numbers = RandomNumbers(first)
        with torch.no_grad(), largest_states():
            _, state = call(first, torch.ones(len(x), 1, dtype=torch.bool, device=x.device), None)
        numbers.restore()
        cache[key] = dict(zip(state, layouts_of(list(state.values()))))
    return cache[key]


class RandomNumbers:
    """A snapshot of torch's random number generators, for the CPU and the devices of ``tensors``."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        devices = {x.device for x in tensors if x is not None and x.is_cuda}
        self._cpu = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Restore the generators, so that the same random numbers are drawn again."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


def _received(group: ContextGroup, layouts: dict[str, Layout], tensors: Sequence[Tensor | None]) -> State:
    """The state from the process before this one, connected to the graph of ``tensors``."""
    anchors = [x for x in tensors if x is not None and x.requires_grad]
    if not anchors:  # parameters of the module may still need gradients
        like = next(x for x in tensors if x is not None)
        anchors = [like.new_empty(0, requires_grad=torch.is_grad_enabled())]
    return dict(zip(layouts, _Receive.apply(group, tuple(layouts.values()), *anchors)))


def _sent(group: ContextGroup, out: Tensor, state: State) -> Tensor:
    """Send ``state`` to the process after this one and return ``out``; its gradient waits for that of the state."""
    return _Send.apply(out, group, *state.values())


class _Receive(torch.autograd.Function):
    """Receives a state from the process before, and sends back its gradient; ``anchors`` connect it to a graph."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, layouts: tuple[Layout, ...], *anchors: Tensor) -> tuple[Tensor, ...]:
        # Copies, because the entries of a message share memory, but autograd tracks each separately.
        state = tuple(x.clone() for x in group.receive(layouts, group.rank - 1, anchors[0].device))
        ctx.group, ctx.anchors = group, len(anchors)
        ctx.sums = [i for i, x in enumerate(layouts) if x.dtype.is_floating_point]
        ctx.mark_non_differentiable(*(x for x in state if not x.is_floating_point()))
        return state

    @staticmethod
    @first_order_alone
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.group.send([grads[i] for i in ctx.sums], ctx.group.rank - 1)
        return None, None, *[None] * ctx.anchors


class _Send(torch.autograd.Function):
    """The identity in ``out``; sends a state to the process after this one, and receives its gradient from there."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, group: ContextGroup, *state: Tensor) -> Tensor:
        group.send(state, group.rank + 1)
        ctx.group, ctx.device, ctx.layouts = group, out.device, layouts_of(state)
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    @first_order_alone
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # activation checkpointing repeats the forward pass here, before this process waits
        sums = [x for x in ctx.layouts if x.dtype.is_floating_point]
        received = iter(ctx.group.receive(sums, ctx.group.rank + 1, ctx.device))
        return grad_out, None, *(next(received) if x.dtype.is_floating_point else None for x in ctx.layouts)
