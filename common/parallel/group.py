"""A group of processes that hold the parts of one sequence, and the messages they send each other."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

#: In a message each tensor starts at a multiple of this many bytes, so that it can be read in place in any dtype.
_ALIGNMENT = 16


class Layout(NamedTuple):
    """The shape and dtype of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes, rounded up to the next multiple of the alignment."""
        return -(-torch.Size(self.shape).numel() * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class ContextGroup:
    """P processes that hold consecutive parts of the same sequences, in the order of their ranks in the group.

    Args:
        group: a process group of torch.distributed, a ``DeviceMesh`` of one dimension, or None for all processes.
        together: a verb phrase for messages, such as "hold one sequence".

    ``rank`` is this process's rank, from 0, and ``size`` is P. ``bytes_sent`` and ``messages_sent`` count what this
    process has sent since they were set to 0: states, their gradients, and one number per row.

    Raises:
        ValueError: torch.distributed is not initialised, a mesh has more than one dimension, or this process is not in
            the group.
    """

    def __init__(
        self, group: "dist.ProcessGroup | DeviceMesh | None" = None, together: str = "hold one sequence"
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("torch.distributed is not initialised; allowed: a group after init_process_group")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group is a mesh of {group.ndim} dimensions; allowed: one of them, mesh['context']")
            group = group.get_group()
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"group does not hold process {dist.get_rank()}; allowed: a group of this process")
        self._ranks, self._together = dist.get_process_group_ranks(self.group), together
        self.bytes_sent = self.messages_sent = 0
        self._under_way: tuple[Any, Tensor] | None = None
        #: The layouts of the states, by module.
        self.layouts: WeakKeyDictionary[Any, dict[Any, dict[str, Layout]]] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict) -> "ContextGroup":
        """Return this group itself: copies of a module share its group."""
        return self

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send ``tensors`` to the process of rank ``to``; waits for the previous message, but not for this one."""
        message = _packed(tensors)
        with self._naming(to):
            self._wait_for_last()
            self._under_way = dist.isend(message, dst=self._ranks[to], group=self.group), message
        self._count(message, 1)

    def receive(self, layouts: Sequence[Layout], source: int, device: torch.device) -> list[Tensor]:
        """Wait for tensors with these ``layouts`` from the process of rank ``source``, and return them."""
        message = torch.empty(sum(x.size for x in layouts), dtype=torch.uint8, device=device)
        with self._naming(source):
            dist.recv(message, src=self._ranks[source], group=self.group)
        return _unpacked(message, layouts)

    def gather(self, x: Tensor) -> Tensor:
        """Stack x, of the same shape in every process, in the order of ranks: (P, ...), the same in all processes."""
        gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._naming(None):
            dist.all_gather(gathered, x.contiguous(), group=self.group)
        self._count(x, self.size - 1)
        return torch.stack(gathered)

    def meet(self, device: torch.device) -> None:
        """Wait for all processes. The first one waits for each other process in turn, and an error names a lost one."""
        message = [torch.zeros(1, dtype=torch.uint8, device=device)]
        others = range(1, self.size) if self.rank == 0 else [0]
        if self.rank:
            self.send(message, 0)
        for other in others:
            self.receive(layouts_of(message), other, device)
        if not self.rank:
            for other in others:
                self.send(message, other)
        self.finish_sending()

    def _count(self, message: Tensor, times: int) -> None:
        self.bytes_sent += message.numel() * message.element_size() * times
        self.messages_sent += times

    def finish_sending(self) -> None:
        """Wait until the last message has left."""
        with self._naming(None):
            self._wait_for_last()

    def _wait_for_last(self) -> None:
        if self._under_way is not None:
            work, _ = self._under_way
            self._under_way = None
            work.wait()

    @contextmanager
    def _naming(self, other: int | None) -> Iterator[None]:
        """Name the process in the error that torch raises if another process has ended or is late."""
        try:
            yield
        except RuntimeError as error:
            whom = "one of the others" if other is None else f"process {self._ranks[other]}"
            raise RuntimeError(
                f"process {self._ranks[self.rank]}, rank {self.rank} of {self.size} that {self._together}, has lost "
                f"{whom}, which ended or did not answer in time; its own output says why. Nothing can go on without "
                f"it. torch.distributed says: {error}"
            ) from error


def first_order_alone(backward: Callable) -> Callable:
    """Decorate a backward pass between processes: ``create_graph=True`` raises ValueError before any process waits."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph is True where several processes hold one sequence; allowed: False, since they exchange "
                "first derivatives alone. For gradients of gradients, hold the sequence in one process"
            )
        return backward(ctx, *grads)

    return checked


def layouts_of(tensors: Sequence[Tensor]) -> list[Layout]:
    """The layouts of ``tensors`` in a message."""
    return [Layout(tuple(x.shape), x.dtype) for x in tensors]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """A message: ``tensors`` one after another as bytes."""
    layouts = layouts_of(tensors)
    message = torch.zeros(sum(x.size for x in layouts), dtype=torch.uint8, device=tensors[0].device)
    for tensor, view in zip(tensors, _unpacked(message, layouts)):
        view.copy_(tensor.detach())
    return message


def _unpacked(message: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """The tensors of a message, as views of its memory."""
    tensors = []
    for part, (shape, dtype) in zip(message.split([x.size for x in layouts]), layouts):
        numbers = torch.Size(shape).numel()
        tensors.append(part[: numbers * dtype.itemsize].view(dtype).view(shape))
    return tensors
