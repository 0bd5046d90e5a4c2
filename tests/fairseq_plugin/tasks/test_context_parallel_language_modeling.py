"""``--task context_parallel_language_modeling`` in one process: its batches; options are in test_every_task.py."""

import pytest

from tests.fairseq_plugin.helpers.commands import training_command
from tests.fairseq_plugin.helpers.tasks import set_up


def _task(data: str, count: int = 2):
    task = ["--task", "context_parallel_language_modeling", "--lineartime-context-parallel", str(count)]
    return set_up(*training_command(data, "unused", "flowformer_lm", *task))[0]


def _batches(task, num_shards: int, shard_id: int) -> list[list[int]]:
    dataset = task.datasets["valid"]
    shards = {"num_shards": num_shards, "shard_id": shard_id, "disable_iterator_cache": True}
    iterator = task.get_batch_iterator(dataset, max_tokens=200, **shards).next_epoch_itr(shuffle=False)
    return [sample["id"].tolist() for sample in iterator if sample]


def test_the_processes_of_a_sequence_read_the_same_batches(data_bin):
    task = _task(data_bin)
    task.load_dataset("valid")
    first, second, third, fourth = (_batches(task, 4, i) for i in range(4))
    assert first == second != third == fourth
    together = sorted(i for batch in (*first, *third) for i in batch)
    assert together == list(range(len(task.datasets["valid"])))
    assert _batches(task, 1, 0)  # evaluation in one process


def test_numbers_of_processes_that_are_refused(data_bin):
    """Those that cannot be divided into sequences, and training in one."""
    task = _task(data_bin, 3)
    task.load_dataset("valid")
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 3; allowed with 4 processes"):
        _batches(task, 4, 0)
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 3; allowed with 1 process"):
        task.train_step({}, None, None, None, 0)
