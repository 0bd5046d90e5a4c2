"""``--task context_parallel_language_modeling`` in one process: its batches, and what it refuses."""

import pytest
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from tests.fairseq_plugin.helpers.commands import training_command


def _task(data: str, *arguments: str, arch: str = "flowformer_lm"):
    task = ["--task", "context_parallel_language_modeling", "--lineartime-context-parallel", "2"]
    command = training_command(data, "unused", arch, *task, *arguments)
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
    return tasks.setup_task(cfg.task), cfg


def _batches(task, num_shards: int, shard_id: int) -> list[list[int]]:
    dataset = task.datasets["valid"]
    shards = {"num_shards": num_shards, "shard_id": shard_id, "disable_iterator_cache": True}
    iterator = task.get_batch_iterator(dataset, max_tokens=200, **shards).next_epoch_itr(shuffle=False)
    return [sample["id"].tolist() for sample in iterator if sample]


def test_the_processes_of_a_sequence_read_the_same_batches(data_bin):
    task, _ = _task(data_bin)
    task.load_dataset("valid")
    first, second, third, fourth = (_batches(task, 4, i) for i in range(4))
    assert first == second != third == fourth
    together = sorted(i for batch in (*first, *third) for i in batch)
    assert together == list(range(len(task.datasets["valid"])))
    assert _batches(task, 1, 0)  # evaluation in one process


def test_processes_that_cannot_be_divided_are_refused(data_bin):
    task, _ = _task(data_bin, "--lineartime-context-parallel", "3")
    task.load_dataset("valid")
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 3; allowed with 4 processes"):
        _batches(task, 4, 0)


def test_training_in_one_process_is_refused(data_bin):
    task, cfg = _task(data_bin)
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 2; allowed with 1 process"):
        task.train_step({}, None, None, None, 0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--lineartime-context-parallel", "0"), "--lineartime-context-parallel is 0; allowed"),
        (("--lineartime-context-timeout", "0"), "--lineartime-context-timeout is 0; allowed"),
        (("--past-target",), "--lineartime-context-parallel is 2; allowed with .*--past-target"),
    ],
    ids=str,
)
def test_bad_options_are_refused(data_bin, arguments, named):
    with pytest.raises(ValueError, match=named):
        _task(data_bin, *arguments)


def test_a_mean_over_sentences_is_refused(data_bin):
    task, cfg = _task(data_bin, "--sentence-avg")
    with pytest.raises(ValueError, match="--sentence-avg is given; allowed"):
        task.build_criterion(cfg.criterion)


def test_documents_that_do_not_see_each_other_are_refused(data_bin):
    task, cfg = _task(data_bin, "--lineartime-reset-at-eos")
    with pytest.raises(ValueError, match="--lineartime-reset-at-eos is given; allowed with .*-parallel 2: not given"):
        task.build_model(cfg.model)


@pytest.mark.parametrize("arch", ["softmax_lm", "transformer_lm", "flash_quad_lm", "daft_full_lm"])
def test_models_that_cannot_are_refused(data_bin, arch):
    task, cfg = _task(data_bin, arch=arch)
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 2, and .*allowed.* flow, "):
        task.build_model(cfg.model)
