"""Peak memory of one call, in a pass of its own that is not timed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def peak_beyond(run: Callable[[], Sequence[Tensor]], device: str) -> int:
    """Bytes that ``run`` needs at its peak beyond what was there before and the tensors it returns.

    On a CPU every allocation that torch makes is counted, those inside of its kernels included; on CUDA the caching
    allocator's own peak.
    """
    peak, kept = _cuda_peak(run) if device == "cuda" else _cpu_peak(run)
    return max(0, peak - kept)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the different storages of ``tensors``."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def _cpu_peak(run: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    """The peak, and what of it the returned tensors are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = run()
        kept = storage_bytes(returned)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    # Frees of what was there before are not counted by the profiler either.
    peak = live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, kept


def _cuda_peak(run: Callable[[], Sequence[Tensor]]) -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, storage_bytes(returned)
