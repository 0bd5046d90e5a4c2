"""``fairseq-train --task context_parallel_language_modeling`` with several processes, beside fairseq's own task."""

from pathlib import Path

import pytest
import torch

from tests.compare import assert_all_close, weights
from tests.fairseq_plugin.helpers.commands import run_two_processes, start_processes, training_command
from tests.fairseq_plugin.helpers.logs import entries, losses

#: Samples of an odd length, no dropout, and three updates; the last batch of the data has shorter ones.
SHORT = ("--dropout", "0", "--attention-dropout", "0", "--tokens-per-sample", "45", "--max-update", "3")


def _trained(folder: Path) -> dict[str, torch.Tensor]:
    return weights(torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"])


def _assert_same(folder: Path, other: Path, output: str, other_output: str) -> None:
    assert len(losses(output)) == 3
    assert losses(output) == pytest.approx(losses(other_output), rel=1e-3)  # they are printed with three digits
    validated, expected = ([x["valid_loss"] for x in entries(printed, "valid")] for printed in (output, other_output))
    assert validated == pytest.approx(expected, rel=1e-3) and validated
    assert all(entry["context_bytes"] > 0 for entry in entries(output, "train_inner"))
    assert entries(output, "train")[0]["train_bsz"] == entries(other_output, "train")[0]["train_bsz"]
    ours, theirs = _trained(folder), _trained(other)
    assert_all_close(theirs, [ours[name] for name in theirs], theirs.values(), 1e-5)


def test_two_pairs_of_processes_train_as_two(data_bin, tmp_path):
    """Each pair has batches of its own, as each of two processes of fairseq's own task; in each update two batches.

    With activation checkpointing, which repeats each exchange. Two trainings in six processes take the seconds; one
    pair trains as one process in ../test_two_processes.py.
    """
    more = [*SHORT, "--checkpoint-activations", "--update-freq", "2", "--optimizer", "sgd", "--lr", "0.5"]
    two = run_two_processes(training_command(data_bin, str(tmp_path / "two"), "flash_lm", *more))
    more += ["--task", "context_parallel_language_modeling", "--lineartime-context-parallel", "2"]
    processes = start_processes(4, training_command(data_bin, str(tmp_path / "four"), "flash_lm", *more))
    four = [process.outputs()[0] for process in processes]
    _assert_same(tmp_path / "four", tmp_path / "two", four[0], two[0])
