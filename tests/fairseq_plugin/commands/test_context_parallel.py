"""``fairseq-train --task context_parallel_language_modeling`` with several processes, beside fairseq's own task."""

from pathlib import Path

import pytest
import torch

from tests.compare import assert_all_close, weights
from tests.fairseq_plugin.helpers.commands import run_module, run_two_processes, start_processes, training_command
from tests.fairseq_plugin.helpers.logs import entries, losses

#: Samples of an odd length, no dropout, and three updates; the last batch of the data has shorter ones.
SHORT = ("--dropout", "0", "--attention-dropout", "0", "--tokens-per-sample", "45", "--max-update", "3")


def _trained(folder: Path) -> dict[str, torch.Tensor]:
    return weights(torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"])


def _assert_same(folder: Path, other: Path, output: str, other_output: str) -> None:
    assert len(losses(output)) == 3
    assert losses(output) == pytest.approx(losses(other_output), rel=1e-3)  # they are printed with three digits
    (one,), (another,) = entries(output, "valid"), entries(other_output, "valid")
    assert one["valid_loss"] == pytest.approx(another["valid_loss"], rel=1e-3)
    assert all(entry["context_bytes"] > 0 for entry in entries(output, "train_inner"))
    assert entries(output, "train")[0]["train_bsz"] == entries(other_output, "train")[0]["train_bsz"]
    ours, theirs = _trained(folder), _trained(other)
    assert_all_close(theirs, [ours[name] for name in theirs], theirs.values(), 1e-5)


def test_two_processes_of_a_sequence_train_as_one(data_bin, tmp_path):
    """With activation checkpointing, which repeats each exchange, and in each update two batches.

    Two trainings in three processes, which take the seconds.
    """
    more = [*SHORT, "--checkpoint-activations", "--update-freq", "2", "--optimizer", "sgd", "--lr", "0.5"]
    one = run_module("fairseq_cli.train", training_command(data_bin, str(tmp_path / "one"), "flash_lm", *more))
    more += ["--task", "context_parallel_language_modeling", "--lineartime-context-parallel", "2"]
    two = run_two_processes(training_command(data_bin, str(tmp_path / "two"), "flash_lm", *more))
    _assert_same(tmp_path / "two", tmp_path / "one", two[0], one)


def test_it_is_composed_with_data_parallelism(data_bin, tmp_path):
    """Two pairs of processes, each pair with batches of its own, train as two processes do with fairseq's own task.

    Two trainings in six processes, which take the seconds.
    """
    more = [*SHORT, "--optimizer", "sgd", "--lr", "0.5"]
    two = run_two_processes(training_command(data_bin, str(tmp_path / "two"), "flowformer_lm", *more))
    more += ["--task", "context_parallel_language_modeling", "--lineartime-context-parallel", "2"]
    processes = start_processes(4, training_command(data_bin, str(tmp_path / "four"), "flowformer_lm", *more))
    four = [process.outputs()[0] for process in processes]
    _assert_same(tmp_path / "four", tmp_path / "two", four[0], two[0])
