"""Training in several processes on CPUs with timm's train.py.

``torchrun --nproc_per_node 2 train.py --device cpu`` fails for every model, timm's own included: it hands
``device_ids=[cpu]`` to DistributedDataParallel, which wants None there. timm's tasks are given that None instead.
"""

import functools
from typing import Any, Callable, List, Optional

import timm.task


def allow_cpu_processes() -> None:
    """Make ``prepare_distributed`` of timm's tasks leave CPUs out of ``device_ids``; nothing else changes."""
    for task in [value for value in vars(timm.task).values() if isinstance(value, type)]:
        prepare = vars(task).get("prepare_distributed")
        if prepare is not None and not hasattr(prepare, "leaves_out_cpus"):
            task.prepare_distributed = _without_cpus(prepare)


def _without_cpus(prepare: Callable) -> Callable:
    @functools.wraps(prepare)
    def prepare_distributed(self: Any, device_ids: Optional[List[Any]] = None, **ddp_args: Any) -> Any:
        if device_ids and all(getattr(device, "type", None) == "cpu" for device in device_ids):
            device_ids = None
        return prepare(self, device_ids=device_ids, **ddp_args)

    prepare_distributed.leaves_out_cpus = True
    return prepare_distributed
