"""Peak memory of one call, measured apart from the timing."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch._C._profiler import _EventType, _ProfilerEvent


def peak_beyond(run: Callable[[], Sequence[Tensor]], device: str) -> int:
    """Peak bytes of ``run`` beyond the memory in use before and the tensors that it returns.

    On a CPU it counts every allocation of torch, including those inside its kernels; on CUDA it is the peak that
    torch's caching allocator reports.
    """
    peak, returned_bytes = _cuda_peak(run) if device == "cuda" else _cpu_peak(run)
    return max(0, peak - returned_bytes)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the different storages of ``tensors``."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def peak_of(allocations: Sequence[tuple[int, int]]) -> int:
    """The most bytes alive at once during ``allocations``: (address, bytes) in order, bytes below 0 for a free.

    Memory that was allocated earlier does not count when it is freed. The profiler reports most of these frees without
    a size, but knows it where an earlier pass had a tensor at the same address.
    """
    peak = live = 0
    addresses = set()
    for address, size in allocations:
        if size > 0:
            addresses.add(address)
        if address in addresses:
            live += size
            peak = max(peak, live)
    return peak


def _cpu_peak(run: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    """The peak, and how many bytes of it are the returned tensors."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = run()
        returned_bytes = storage_bytes(returned)
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    allocations = [event.typed[1] for event in sorted(events, key=lambda event: event.start_time_ns)]
    return peak_of([(allocation.ptr, allocation.alloc_size) for allocation in allocations]), returned_bytes


def _allocations(events: Sequence[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    """Every allocation and every free among ``events`` and their children."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def _cuda_peak(run: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, storage_bytes(returned)
