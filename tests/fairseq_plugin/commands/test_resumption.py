"""A training that is stopped in the middle of an epoch and goes on is the training that was never stopped.

To the last bit of weights and optimizer, for everything that draws random numbers. fairseq seeds torch's generator by
the number of each update; what else a result depends on must be in the checkpoint. Several processes train as one does,
and go on, too; ../tasks/test_every_task.py compares every task and criterion, update by update.
"""

import json
from pathlib import Path

import pytest
import torch

from tests import compare
from tests.fairseq_plugin.helpers import tasks
from tests.fairseq_plugin.helpers.commands import (
    NO_READER_THREAD,
    USER_DIR,
    NamedRuns,
    masked_training_command,
    run_in_turn,
    run_two_processes,
    start_processes,
    training_command,
    translation_training_command,
)
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.logs import entries, losses

PROGRAM = str(Path(__file__).parents[1] / "helpers" / "resumed_trainings.py")
DROPOUT = "--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1".split()
#: Eight updates of two batches each, which are between two and three epochs.
LENGTH = "--max-update 8 --update-freq 2 --disable-validation --no-epoch-checkpoints".split()
ALWAYS = [*LENGTH, *DROPOUT, *NO_READER_THREAD]
#: fairseq's own tasks else keep the batches of the epoch in which a process began.
OWN_BATCHES = ["--update-epoch-batch-itr", "True"]
TEXT = ["--tokens-per-sample", "24", "--max-tokens", "480", *ALWAYS, *OWN_BATCHES]
CHECKPOINTED = ["--checkpoint-activations"]
STILL = ("--dropout", "0", "--attention-dropout", "0")
SHORT = "--cpu --seed 1 --log-format json --log-interval 1 --optimizer adam --lr 1e-3".split()

#: What draws random numbers of its own, and what decides which layers and weights take part, in layers of one model.
DRAWN = (
    "--lineartime-layers favor,rfa_gate,reformer,yoso --decoder-layers 4 --favor-redraw 4 --decoder-layerdrop 0.3 "
    "--quant-noise-pq 0.1"
).split()
LANGUAGE_MODELS = {
    "mechanisms": ("hybrid_lm", *DRAWN, *CHECKPOINTED),
    "selection, decay of linear layers": (
        *("daft_conv_lm", "--daft-gumbel-temperature", "0.5", "--attention-dropout", "0"),
        *("--lineartime-decay-linear-only", "--weight-decay", "0.5"),
    ),
}
MASKED = ("bigbird_mlm", "--encoder-layerdrop", "0.3", *CHECKPOINTED)  # masks, and random chunks
STREAMS = ["--task", "streaming_language_modeling", "--tokens-per-sample", "24", "--batch-size", "16", *ALWAYS]
STREAMS += ["--flow-short-conv", "3", "--num-workers", "2", *CHECKPOINTED]
#: Architecture and batch size with which an epoch of a training in helpers/tasks.py is three updates.
TASKS = {
    "pixels": ("rfa_lm", "8"),
    "spans": ("flash_mlm", "5"),
    "pairs": ("rfa_lra_retrieval", "1"),
    "series": ("rfa_time_series", "4"),
    "episodes": ("rfa_decision", "7", "--num-workers", "2"),
}
OTHERS = ("masked", "streams", "translation", *TASKS)


# ---- Several processes


def check_resumed(command: list[str], folder: Path, update: int, total: int) -> list[str]:
    """Two processes that go on from ``update`` of ``total`` give what they gave before; returns what they printed.

    Each reads the checkpoint itself: what fairseq sends from one to the other, torch does not load.
    """
    command = [*command, "--save-interval-updates", str(update), "--load-checkpoint-on-all-dp-ranks"]
    output = run_two_processes(command)
    runs = NamedRuns(folder, {})
    whole, wanted = losses(output[0]), runs.weights("")
    (stopped,) = folder.glob(f"checkpoint_*_{update}.pt")
    stopped.rename(folder / "checkpoint_last.pt")
    assert len(whole) == total and losses(run_two_processes(command)[0]) == whole[update:]
    assert all(torch.equal(x, wanted[name]) for name, x in runs.weights("").items())
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
    ours, theirs = (NamedRuns(tmp_path, {}).weights(name) for name in ("four", "two"))
    compare.assert_all_close(theirs, [ours[name] for name in theirs], theirs.values(), 1e-5)


@pytest.mark.usefixtures("plain_pytorch")
def test_random_features_are_drawn_alike_and_go_on(data_bin: str, tmp_path: Path) -> None:
    """FAVOR+ draws its features anew in between, without recomputed activations."""
    text = "--tokens-per-sample 24 --max-tokens 240 --update-freq 2 --disable-validation --no-epoch-checkpoints".split()
    text += "--update-epoch-batch-itr True --dropout 0.1 --attention-dropout 0.1".split()
    command = training_command(data_bin, str(tmp_path), "favor_lm", "--favor-redraw", "2", *text, "--max-update", "5")
    check_resumed(command, tmp_path, 2, 5)


@pytest.mark.usefixtures("plain_pytorch")
def test_streams_go_on(data_bin: str, tmp_path: Path) -> None:
    """They train as one process with twice the rows, and go on in the middle of an epoch, beside validation."""
    rows = "--task streaming_language_modeling --tokens-per-sample 24 --batch-size-valid 2 --update-freq 2".split()
    model = ["flowformer_lm", *rows, *STILL]
    two = training_command(data_bin, str(tmp_path / "two"), *model, "--batch-size", "4")
    output, _ = check_resumed(two, tmp_path / "two", 3, 6)
    alone = training_command(data_bin, str(tmp_path / "one"), *model, "--batch-size", "8")
    (one,) = run_in_turn(("fairseq_cli.train", alone, ""))
    assert losses(output) == pytest.approx(losses(one), abs=2e-3)


# ---- One process


@pytest.fixture(scope="module")
def found(plain_pytorch, data_bin: str, pairs_bin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Findings of the program about every training; together they cost seconds."""
    root = tmp_path_factory.mktemp("resumption")
    to = {name: str(root / "runs" / name) for name in (*LANGUAGE_MODELS, *OTHERS)}
    cases = {
        name: training_command(data_bin, to[name], arch, *TEXT, *more)
        for name, (arch, *more) in LANGUAGE_MODELS.items()
    }
    cases["masked"] = masked_training_command(data_bin, to["masked"], *MASKED[:1], *TEXT, *MASKED[1:])
    cases["streams"] = training_command(data_bin, to["streams"], "flowformer_lm", *STREAMS)
    cross = ["--max-tokens", "600", "--lineartime-cross-attention", "favor", *OWN_BATCHES]
    cases["translation"] = translation_training_command(pairs_bin, to["translation"], "rfa", *ALWAYS, *cross)
    tasks.write(root)
    for name, (arch, size, *more) in TASKS.items():
        data, *command = tasks.COMMANDS[name].split()
        command += [*(SMALL if arch == "rfa_lm" else ()), "--arch", arch, "--batch-size", size, *more, *SHORT, *ALWAYS]
        command += ["--required-batch-size-multiple", "1", "--save-dir", to[name]]
        cases[name] = [str(root / data), "--user-dir", USER_DIR, *command]
    (root / "cases.json").write_text(json.dumps(cases))
    (output,) = run_in_turn((PROGRAM, [str(root / "cases.json")], ""))
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith("RESUMED ")]
    return {name: one for line in lines for name, one in json.loads(line).items()}


@pytest.mark.usefixtures("plain_pytorch")
@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *OTHERS])
def test_it_goes_on_as_if_it_had_never_stopped(found: dict[str, dict], name: str) -> None:
    """The second epoch was not over when it stopped, and the third begins after that."""
    one = found[name]
    assert 1 < one["epochs"] < 2, "it was to be stopped in its second epoch"
    assert len(one["whole"]) == 8 and one["resumed"] == one["whole"][5:]
    assert one["differs"] == []
