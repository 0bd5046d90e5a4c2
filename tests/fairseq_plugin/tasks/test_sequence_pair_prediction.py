"""Pairs of sequences: samples of two inputs, what is missing, and a training through fairseq's commands."""

import re

import numpy as np
import pytest
import torch

from recipes.lra.data import dictionary, write
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.tasks import set_up

TASK = "--task sequence_pair_prediction --criterion sentence_prediction --num-classes 2 --init-token 0".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of random symbols; the label says whether both begin with the same one."""
    rng = np.random.default_rng(1)

    def examples(count):
        for _ in range(count):
            one, two = (rng.integers(0, 3, rng.integers(2, 9)) for _ in range(2))
            yield [one, two], int(one[0] == two[0])

    folder = tmp_path_factory.mktemp("pairs")
    write(folder, {"train": examples(64), "valid": examples(20)}, dictionary("abc"), range(2))
    return folder / "data-bin"


def load(folder, *arguments):
    return set_up(folder, *TASK, "--arch", "flow_lra_retrieval", "--max-positions", "10", *arguments)[0]


def test_samples(data):
    task = load(data)
    dataset = task.load_dataset("valid")
    assert len(dataset) == 20 and task.sequences == 2
    batch = dataset.collater([dataset[i] for i in range(20)])
    first, second = batch["net_input"]["src_tokens"], batch["net_input"]["src_tokens2"]
    assert (first[:, 0] == 0).all() and (second[:, 0] == 0).all()  # the token that stands for the whole
    assert torch.equal(batch["target"].view(-1), (first[:, 1] == second[:, 1]).long())
    for tokens, lengths in ((first, "src_lengths"), (second, "src_lengths2")):
        assert torch.equal(batch["net_input"][lengths], tokens.ne(1).sum(1))
    longest = np.maximum(*(batch["net_input"][name].numpy() for name in ("src_lengths", "src_lengths2")))
    assert [dataset.size(i) for i in range(20)] == longest.tolist()  # what fairseq makes batches by


def test_parts_of_other_lengths_are_named(data, tmp_path):
    """Parts that are missing are in test_every_task.py."""
    (tmp_path / "pairs" / "input1").mkdir(parents=True)
    for kind in ("input0", "label"):
        (tmp_path / "pairs" / kind).symlink_to(data / kind)
    for ending in ("bin", "idx"):
        (tmp_path / "pairs" / "input1" / f"valid.{ending}").symlink_to(data / "input1" / f"train.{ending}")
    with pytest.raises(ValueError, match=re.escape("[20, 64, 20]")):
        load(tmp_path / "pairs").load_dataset("valid")


@pytest.mark.parametrize("option", ["--separator-token=2", "--add-prev-output-tokens", "--d2v2-multi"])
def test_options_of_joined_sentences_are_not_there(option, data, capsys):
    with pytest.raises(SystemExit):
        load(data, option)
    assert option.partition("=")[0] in capsys.readouterr().err


def test_options_of_one_sequence_are_honoured(data):
    """Shortened to --max-positions with the token in front, and in the order of the file."""
    task = load(data, "--max-positions", "4", "--shorten-method", "truncate", "--no-shuffle")
    dataset = task.load_dataset("valid")
    assert max(dataset.size(i) for i in range(20)) == 4
    assert dataset[0]["id"] == 0 and [dataset[i]["id"] for i in range(20)] == list(range(20))
    whole = load(data, "--no-shuffle").load_dataset("valid")
    assert max(whole.size(i) for i in range(20)) > 4


def test_it_trains_and_validates(data, tmp_path):
    """Costs the start of one process. The checkpoint is read again, head of two sequences and all."""
    common = [str(data), "--user-dir", USER_DIR, *TASK, "--max-positions", "10", "--batch-size", "16", "--cpu"]
    common += ["--required-batch-size-multiple", "1", "--log-format", "json", "--num-workers", "0"]
    model = "--arch flow_lra_retrieval --encoder-embed-dim 8 --encoder-attention-dim 8 --encoder-layers 1".split()
    training = [*model, "--optimizer", "adam", "--lr", "1e-3", "--max-epoch", "2", "--save-dir", str(tmp_path)]
    outputs = run_in_turn(
        ("fairseq_cli.train", [*common, *training, "--no-epoch-checkpoints"], ""),
        ("fairseq_cli.validate", [*common, "--path", str(tmp_path / "checkpoint_last.pt")], ""),
    )
    last = entries(outputs[0], "valid")[-1]
    assert last["valid_num_updates"] == 8
    assert entries(outputs[1], "valid")[-1]["valid_accuracy"] == pytest.approx(last["valid_accuracy"], abs=0.1)
