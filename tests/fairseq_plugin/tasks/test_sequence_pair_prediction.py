"""Pairs of sequences: samples of two inputs, what is missing, and a training through fairseq's commands."""

import re
import warnings

import numpy as np
import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_plugin  # noqa: F401  registers the task
from recipes.lra.examples import Example, symbol_dictionary, write_examples
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries

FIRST = 4
TASK = "--task sequence_pair_prediction --criterion sentence_prediction --num-classes 2 --init-token 0".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of random symbols; the label says whether both begin with the same one."""
    rng = np.random.default_rng(1)

    def examples(count):
        for _ in range(count):
            one, two = (rng.integers(0, 3, rng.integers(2, 9)).astype(np.int32) + FIRST for _ in range(2))
            yield Example((one, two), int(one[0] == two[0]))

    folder = tmp_path_factory.mktemp("pairs") / "data-bin"
    splits = {"train": examples(64), "valid": examples(20)}
    write_examples(folder, splits, symbol_dictionary("abc"), 2, inputs=2)
    return folder


def load(folder, *arguments):
    args = options.parse_args_and_arch(
        options.get_training_parser(),
        [str(folder), *TASK, "--arch", "flow_lra_retrieval", "--max-positions", "10", *arguments],
    )
    return tasks.setup_task(args)


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


def test_missing_parts_are_named(data, tmp_path):
    (tmp_path / "pairs").mkdir()
    for kind in ("input0", "label"):
        (tmp_path / "pairs" / kind).symlink_to(data / kind)
    with pytest.raises(ValueError, match=r"input1.valid.idx does not exist; allowed.*fairseq-preprocess .*--srcdict"):
        load(tmp_path / "pairs").load_dataset("valid")
    (tmp_path / "pairs" / "input1").mkdir()
    for ending in ("bin", "idx"):
        (tmp_path / "pairs" / "input1" / f"valid.{ending}").symlink_to(data / "input1" / f"train.{ending}")
    with pytest.raises(ValueError, match=re.escape("[20, 64, 20]")):
        load(tmp_path / "pairs").load_dataset("valid")


@pytest.mark.parametrize("part", ["input0", "label"])
def test_a_folder_without_a_dictionary(part, data, tmp_path):
    """What is missing is named, and the command that makes it."""
    for kind in {"input0", "input1", "label"} - {part}:
        (tmp_path / kind).symlink_to(data / kind)
    missing = re.escape(str(tmp_path / part))
    with pytest.raises(ValueError, match=rf"{missing}.dict.txt does not exist; allowed.*--destdir {missing}"):
        load(tmp_path)


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-classes", "0"], "--num-classes is 0"),
        (["--max-positions", "0"], "--max-positions is 0"),
        (["--regression-target"], "--regression-target is given; allowed with --task sequence_pair_prediction"),
        (["--criterion", "cross_entropy"], "--criterion is cross_entropy; allowed with --task sequence_pair_pred"),
    ],
)
def test_what_the_task_cannot_do(arguments, message, data):
    args = options.parse_args_and_arch(
        options.get_training_parser(), [str(data), *TASK, "--arch", "flow_lra_retrieval", *arguments]
    )
    with pytest.raises(ValueError, match=message):
        config = convert_namespace_to_omegaconf(args)
        tasks.setup_task(config.task).build_criterion(config.criterion)


def test_labels_of_another_order_are_a_warning(data):
    """The head of a file remembers what its scores stand for, in this model of two sequences as in others."""
    command = [str(data), *TASK, "--arch", "flow_lra_retrieval", "--encoder-layers", "1"]
    args = options.parse_args_and_arch(options.get_training_parser(), command)
    model = tasks.setup_task(args).build_model(args)
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)
    model.labels = ["1", "0"]
    model.register_classification_head("sentence_classification_head", num_classes=2)
    with pytest.warns(UserWarning, match=r"labels=\['0', '1'\].*labels=\['1', '0'\]"):
        model.load_state_dict(state)


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
