"""Trainings in several processes train as one process does, or as one that reads as much, and go on where they stopped.

../tasks/test_every_task.py compares every task and criterion, update by update.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import compare
from tests.fairseq_plugin.helpers.commands import (
    run_in_turn,
    run_two_processes,
    start_processes,
    training_command,
    translation_training_command,
)
from tests.fairseq_plugin.helpers.logs import entries, losses

STILL = ("--dropout", "0", "--attention-dropout", "0")


def weights(folder: Path) -> dict[str, Tensor]:
    """Of the last checkpoint."""
    return compare.weights(torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"])


def check_resumed(command: list[str], folder: Path, update: int, total: int) -> list[str]:
    """Two processes that go on from ``update`` of ``total`` give what they gave before; returns what they printed.

    Each reads the checkpoint itself: what fairseq sends from one to the other, torch does not load.
    """
    command = [*command, "--save-interval-updates", str(update), "--load-checkpoint-on-all-dp-ranks"]
    output = run_two_processes(command)
    whole, wanted = losses(output[0]), weights(folder)
    (stopped,) = folder.glob(f"checkpoint_*_{update}.pt")
    stopped.rename(folder / "checkpoint_last.pt")
    assert len(whole) == total and losses(run_two_processes(command)[0]) == whole[update:]
    assert all(torch.equal(x, wanted[name]) for name, x in weights(folder).items())
    return output


def test_pairs_of_processes_hold_a_sequence_together(data_bin: str, tmp_path: Path) -> None:
    """Two pairs train as two processes of fairseq's own task; in each update two batches, of an odd length.

    With activation checkpointing, which repeats each exchange. Two trainings in six processes take the seconds, with
    kernels for CPUs: it comes before the tests without.
    """
    more = [*STILL, *"--tokens-per-sample 45 --max-update 3 --checkpoint-activations --update-freq 2".split()]
    more += ["--optimizer", "sgd", "--lr", "0.5"]
    two = run_two_processes(training_command(data_bin, str(tmp_path / "two"), "flash_lm", *more))[0]
    more += ["--task", "context_parallel_language_modeling", "--lineartime-context-parallel", "2"]
    processes = start_processes(4, training_command(data_bin, str(tmp_path / "four"), "flash_lm", *more))
    four = [process.outputs()[0] for process in processes][0]
    assert len(losses(four)) == 3
    assert losses(four) == pytest.approx(losses(two), rel=1e-3)  # they are printed with three digits
    validated, expected = ([x["valid_loss"] for x in entries(printed, "valid")] for printed in (four, two))
    assert validated == pytest.approx(expected, rel=1e-3) and validated
    assert all(entry["context_bytes"] > 0 for entry in entries(four, "train_inner"))
    assert entries(four, "train")[0]["train_bsz"] == entries(two, "train")[0]["train_bsz"]
    ours, theirs = (weights(tmp_path / name) for name in ("four", "two"))
    compare.assert_all_close(theirs, [ours[name] for name in theirs], theirs.values(), 1e-5)


@pytest.mark.usefixtures("plain_pytorch")
def test_random_features_are_drawn_alike_and_go_on(data_bin: str, tmp_path: Path) -> None:
    """FAVOR+ draws its features anew in between, without recomputed activations."""
    text = "--tokens-per-sample 24 --max-tokens 240 --update-freq 2 --disable-validation --no-epoch-checkpoints".split()
    text += "--update-epoch-batch-itr True --dropout 0.1 --attention-dropout 0.1".split()
    command = training_command(data_bin, str(tmp_path), "favor_lm", "--favor-redraw", "2", *text, "--max-update", "5")
    check_resumed(command, tmp_path, 2, 5)


@pytest.mark.usefixtures("plain_pytorch")
@pytest.mark.parametrize("more", [[], ["--disable-validation"]], ids=["validated", "not validated"])
def test_streams_go_on(more: list[str], data_bin: str, tmp_path: Path) -> None:
    """They train as one process with twice the rows, and go on in the middle of an epoch."""
    rows = "--task streaming_language_modeling --tokens-per-sample 24 --batch-size-valid 2 --update-freq 2".split()
    model = ["flowformer_lm", *rows, *STILL, *more]
    two = training_command(data_bin, str(tmp_path / "two"), *model, "--batch-size", "4")
    output, _ = check_resumed(two, tmp_path / "two", 3, 6)
    alone = training_command(data_bin, str(tmp_path / "one"), *model, "--batch-size", "8")
    (one,) = run_in_turn(("fairseq_cli.train", alone, ""))
    assert losses(output) == pytest.approx(losses(one), abs=2e-3)


@pytest.mark.usefixtures("plain_pytorch")
def test_pairs_learn_in_half_precision(pairs_bin: str, tmp_path: Path) -> None:
    """By fairseq's --fp16 on a CPU, with its own loss scaling."""
    more = ["--fp16", "--fp16-no-flatten-grads", "--lineartime-cross-attention", "flow_source"]
    output, other = run_two_processes(translation_training_command(pairs_bin, str(tmp_path), "flowformer", *more))
    numbers = losses(output)
    assert len(numbers) == 6 and numbers[-1] < numbers[0] and not losses(other)  # the first one logs
    assert '"loss_scale": "128"' in output
