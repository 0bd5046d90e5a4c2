"""Measure the duration of an update, from which a comparison computes its number of updates."""

import statistics
import time
from collections.abc import Sequence

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

_WARM_UP, _MEASURED = 2, 7


def seconds_per_update(arguments: Sequence[object]) -> float:
    """The median duration of a few updates on one thread, as fairseq-train runs them with ``arguments``."""
    parsed = options.parse_args_and_arch(options.get_training_parser(), [str(argument) for argument in arguments])
    config = convert_namespace_to_omegaconf(parsed)
    task = tasks.setup_task(config.task)
    task.load_dataset("train")
    model, criterion = task.build_model(config.model).train(), task.build_criterion(config.criterion)
    optimizer, dataset = torch.optim.AdamW(model.parameters(), lr=1e-4), task.dataset("train")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    try:
        for i in range(_WARM_UP + _MEASURED):
            started = time.perf_counter()
            first = i * config.dataset.batch_size
            batch = dataset.collater([dataset[first + j] for j in range(config.dataset.batch_size)])
            loss, size, _ = criterion(model, batch)
            optimizer.zero_grad()
            (loss / size).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[_WARM_UP:])
