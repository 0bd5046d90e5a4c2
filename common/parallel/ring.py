"""A state that goes from process to process, with its gradient on the way back.

Process r takes the state after the tokens of the processes before it, computes its own tokens, and gives the state
after them to process r + 1. The backward pass runs the other way. That is the whole sequence in one process, cut where
the processes meet: no mathematics of a mechanism is in here. Rows of a batch that do not know of each other go one
after another, so that the processes work at the same time: of U groups of rows, a share U / (U + P - 1) of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.shared.state import State, largest_states
from .group import ContextGroup, Layout, first_order_alone, layouts_of

#: ``call(tensors, padding_mask, state) -> (out, state)``: the next tokens of the rows, and the state after them.
Call = Callable[[Sequence[Tensor | None], Tensor | None, State | None], tuple[Tensor, State]]
#: Groups of rows for each process: of P processes 4 P groups, where there are as many rows.
_GROUPS_PER_PROCESS = 4


def carried(
    group: ContextGroup,
    owner: Any,
    call: Call,
    tensors: Sequence[Tensor | None],
    padding_mask: Tensor | None,
) -> Tensor:
    """The outputs of ``call`` for this process's tokens, after those of the processes before it in ``group``.

    ``tensors`` have rows first and tokens third, (B, H, n, c) or (B, H, n), and so has the output; ``padding_mask`` is
    bool (B, n), True = padding. ``owner`` is the module whose states these are: they have one layout. Every process of
    the group calls this in the same order, and later the backward pass. Where ``call`` draws random numbers, all groups
    of rows get the same. torch.compile breaks its graph here.
    """
    if group.size == 1:
        return call(tensors, padding_mask, None)[0]
    # A graph holds no messages, and does not see that states have their largest size.
    run = torch.compiler.disable(_carried) if torch.compiler.is_compiling() else _carried
    return run(group, owner, call, tensors, padding_mask)


def _carried(
    group: ContextGroup,
    owner: Any,
    call: Call,
    tensors: Sequence[Tensor | None],
    padding_mask: Tensor | None,
) -> Tensor:
    """``carried`` by more than one process."""
    rows = next(x.shape[0] for x in tensors if x is not None)
    count = groups(rows, group.size)
    outs, numbers = [], RandomNumbers(tensors) if count > 1 else None
    for i in range(count):
        if numbers is not None and i:
            numbers.restore()
        start, end = rows * i // count, rows * (i + 1) // count
        own = [_rows(x, start, end) for x in tensors] if count > 1 else tensors
        mask = _rows(padding_mask, start, end)
        layouts = state_layouts(group, owner, call, own)
        state = None if group.rank == 0 else _received(group, layouts, own)
        with largest_states():  # every process sends and receives one layout
            out, after = call(own, mask, state)
        outs.append(out if group.rank == group.size - 1 else _sent(group, out, {name: after[name] for name in layouts}))
    return outs[0] if count == 1 else torch.cat(outs)


def groups(rows: int, processes: int) -> int:
    """Into how many groups the ``rows`` are cut that go one after another: at most four times the processes."""
    return min(rows, _GROUPS_PER_PROCESS * processes)


def _rows(x: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if x is None else x[start:end]


def state_layouts(group: ContextGroup, owner: Any, call: Call, tensors: Sequence[Tensor | None]) -> dict[str, Layout]:
    """The layout of each entry of a state of the largest size, from one token of padding; the same in every process."""
    known = group.layouts.setdefault(owner, {})
    key = tuple(None if x is None else (x.shape[:2], x.shape[3:], x.dtype, x.device) for x in tensors)
    key = (*key, torch.is_autocast_enabled(tensors[-1].device.type))
    if key not in known:
        first = [None if x is None else x[:, :, :1].detach() for x in tensors]
        x = next(x for x in first if x is not None)
        numbers = RandomNumbers(first)
        with torch.no_grad(), largest_states():
            _, state = call(first, torch.ones(len(x), 1, dtype=torch.bool, device=x.device), None)
        numbers.restore()
        known[key] = dict(zip(state, layouts_of(list(state.values()))))
    return known[key]


class RandomNumbers:
    """torch's generators as they are now, of the CPU and of the device of ``tensors``."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        devices = {x.device for x in tensors if x is not None and x.is_cuda}
        self._cpu = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Set the generators back, so that the same random numbers come again."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


def _received(group: ContextGroup, layouts: dict[str, Layout], tensors: Sequence[Tensor | None]) -> State:
    """The state from the process before this one, a part of the graph of ``tensors``."""
    anchors = [x for x in tensors if x is not None and x.requires_grad]
    if not anchors:  # parameters of the module may need gradients all the same
        like = next(x for x in tensors if x is not None)
        anchors = [like.new_empty(0, requires_grad=torch.is_grad_enabled())]
    return dict(zip(layouts, _Receive.apply(group, tuple(layouts.values()), *anchors)))


def _sent(group: ContextGroup, out: Tensor, state: State) -> Tensor:
    """``out``, after ``state`` was sent to the process after this one; its gradient waits for the state's."""
    return _Send.apply(out, group, *state.values())


class _Receive(torch.autograd.Function):
    """A state from the process before this one; its gradient goes there. ``anchors`` only make it part of a graph."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, layouts: tuple[Layout, ...], *anchors: Tensor) -> tuple[Tensor, ...]:
        # Copies, because the entries of a message share memory, and autograd follows each by itself.
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
    """``out`` as it is; on the way a state goes to the process after this one, and its gradient comes from there."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, group: ContextGroup, *state: Tensor) -> Tensor:
        group.send(state, group.rank + 1)
        ctx.group, ctx.device, ctx.layouts = group, out.device, layouts_of(state)
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    @first_order_alone
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # activation checkpointing repeats the forward pass now, before this waits for another
        sums = [x for x in ctx.layouts if x.dtype.is_floating_point]
        received = iter(ctx.group.receive(sums, ctx.group.rank + 1, ctx.device))
        return grad_out, None, *(next(received) if x.dtype.is_floating_point else None for x in ctx.layouts)
