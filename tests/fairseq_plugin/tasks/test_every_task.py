"""Every task: its batches with their padding, the order of epochs, spawned readers, and what it refuses."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.tasks import TASK_REGISTRY
from torch import Tensor

from fairseq_plugin.data.pixels import SHAPE_FILE
from tests.fairseq_plugin.helpers import unequal_batches
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.spans import TASK as SPANS
from tests.fairseq_plugin.helpers.spans import WINDOWS
from tests.fairseq_plugin.helpers.tasks import set_up

SMALL_ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2"
#: The folder of ``unequal_batches.write`` and the arguments of a training of each task.
COMMANDS = {
    "pixels": f"--task pixel_modeling --arch flowformer_lm --tokens-per-sample 60 {' '.join(SMALL)}",
    "spans": f"{' '.join([*SPANS, *WINDOWS])} --arch flash_mlm {SMALL_ENCODER.partition(' --encoder-att')[0]}",
    "pairs": "--task sequence_pair_prediction --criterion sentence_prediction --num-classes 2 --init-token 0 "
    f"--arch flow_lra_retrieval --max-positions 10 {SMALL_ENCODER}",
    "series": f"--task time_series_classification --criterion sentence_prediction --arch linear_time_series "
    f"{SMALL_ENCODER}",
    "episodes": "--task offline_rl --criterion action_mse --arch linear_decision --context 5 --windows-per-epoch 40",
    "text": "--task context_parallel_language_modeling --lineartime-context-parallel 2 --arch flowformer_lm "
    f"--tokens-per-sample 16 {' '.join(SMALL)}",
    "streams": "--task streaming_language_modeling --arch flowformer_lm --tokens-per-sample 16 " + " ".join(SMALL),
}
#: Language modeling that differs in generation alone.
GENERATES = "prompted_language_modeling"
FOLDERS = {"streams": "text", "pairs": "pairs/data-bin"}
#: Arguments that are refused, and what the message says of them.
REFUSED = {
    "pixels": {
        "--tokens-per-sample 59": "--tokens-per-sample is 59 .*--context-window, if given.*; allowed: 60",
        "--sample-break-mode eos": "--sample-break-mode is eos; allowed with --task pixel_modeling: none",
        "--shorten-method truncate": "--shorten-method is truncate; allowed",
        "--add-bos-token": "--add-bos-token is True; allowed",
        "--past-target": "--past-target is True; allowed",
        "--self-target": "--self-target is True; allowed",
        "--pad-to-fixed-bsz": "--pad-to-fixed-bsz is True; allowed",
        "--output-dictionary-size 100": "--output-dictionary-size is 100; allowed",
        "--pixel-max-shift -1": "--pixel-max-shift is -1; allowed: 0..255",
        "--pixel-max-shift 256": "--pixel-max-shift is 256; allowed: 0..255",
    },
    "spans": {
        "--max-positions 9": "--max-positions is 9; allowed: at least 10, for <s>, a question of 6 tokens",
        "--max-positions 0": "--max-positions is 0; allowed",
        "--max-question-length 0": "--max-question-length is 0; allowed",
        "--max-answer-length 0": "--max-answer-length is 0; allowed",
        "--span-stride 0": "--span-stride is 0; allowed",
        "--span-stride 24": "--span-stride is 24; allowed: at most 23, the tokens of a document in a window of 32",
        "--arch flow_classifier": "--arch is flow_classifier; allowed with --task span_extraction: roberta",
        "--arch flow_time_series": "--arch is flow_time_series; allowed with --task span_extraction: roberta",
        "--criterion sentence_prediction": "--criterion is sentence_prediction; allowed with --task span_extraction",
    },
    "pairs": {
        "--num-classes 0": "--num-classes is 0",
        "--max-positions 0": "--max-positions is 0",
        "--regression-target": "--regression-target is given; allowed with --task sequence_pair_prediction",
        "--criterion cross_entropy": "--criterion is cross_entropy; allowed with --task sequence_pair_pred",
    },
    "series": {
        "--max-length 0": "--max-length is 0; allowed",
        "--arch flow_classifier": "--arch is flow_classifier; allowed .*: .*flowformer_time_series",
        "--criterion cross_entropy": "--criterion is cross_entropy; allowed .*: sentence_prediction",
        "--regression-target": "--regression-target is given; allowed with --task time_series_classification",
    },
    "episodes": {
        "--context 0": "--context is 0.*; allowed",
        "--context all": "--context is all.*; allowed",
        "--max-episode-length 0": "--max-episode-length is 0.*; allowed",
        "--max-episode-length 11": "episode 0 of train has 12 steps; allowed: at most 11, --max-episode-length",
        "--windows-per-epoch 0": "--windows-per-epoch is 0.*; allowed",
        "--return-scale 0": "--return-scale is 0.*; allowed",
        "--arch flow_classifier": "--arch is flow_classifier; allowed .*: .*flowformer_decision",
        "--criterion cross_entropy": "--criterion is cross_entropy; allowed .*: action_mse",
        "--arch awac_decision": "--criterion is action_mse; allowed .* this --arch: awac",
        "--arch bc_decision --criterion awac": "--criterion is awac; allowed .* this --arch: action_mse",
    },
    "text": {
        "--lineartime-context-parallel 0": "--lineartime-context-parallel is 0; allowed",
        "--lineartime-context-timeout 0": "--lineartime-context-timeout is 0; allowed",
        "--past-target": "--lineartime-context-parallel is 2; allowed with .*--past-target",
        "--sentence-avg": "--sentence-avg is given; allowed",
        "--lineartime-reset-at-eos": "--lineartime-reset-at-eos is given; allowed with .*-parallel 2: not given",
        "--arch softmax_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
        "--arch transformer_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
        "--arch flash_quad_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
        "--arch daft_full_lm": "--lineartime-context-parallel is 2, and .*allowed.* flow, ",
    },
    "streams": {
        "--sample-break-mode eos": "--sample-break-mode is eos; allowed .* none",
        "--add-bos-token": "--add-bos-token is True; allowed",
        "--shorten-method truncate": "--shorten-method is truncate",
        "--self-target": "--self-target is True",
        "--past-target": "--past-target is True",
        "--arch softmax_lm": "'softmax' attention, whose state grows",
        "--arch flash_quad_lm --flash-relative-bias rotary": "GatedAttentionUnit' attention, whose state grows",
        "--arch combiner_lm": "whose state grows",
        "--arch rfa_lm": "'rfa' attention, which draws anew",
        "--arch favor_lm --favor-redraw 5": "'favor' attention, which draws anew",
        "--decoder-layerdrop 0.1": "--decoder-layerdrop is 0.1; allowed .* 0",
        "--decoder-learned-pos": "positions or distances of .* --decoder-learned-pos",
        "--arch daft_full_lm": "positions or distances",
        "--arch transformer_lm": "TransformerLanguageModel; allowed .* language models of this plugin",
    },
}
#: Folders without a file, and what the message says of it.
MISSING = {
    ("pixels", SHAPE_FILE): f"lacks {SHAPE_FILE}; allowed",
    ("spans", "dict.txt"): "dict.txt does not exist; allowed: a folder that .*recipes.triviaqa.data",
    ("pairs", "input0/dict.txt"): "input0.dict.txt does not exist; allowed.*--destdir .*input0",
    ("pairs", "label/dict.txt"): "label.dict.txt does not exist; allowed.*--destdir .*label",
    ("pairs", "input1"): "input1.train.idx does not exist; allowed.*fairseq-preprocess .*--srcdict",
    ("series", "series.json"): "lacks series.json",
    ("series", "train.npz"): "no split train; allowed: test",
    ("episodes", "episodes.json"): "lacks episodes.json",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small data for every task."""
    folder = tmp_path_factory.mktemp("tasks")
    unequal_batches.write(folder)
    return folder


def load(name: str, data: Path, *arguments: str):
    """The task of a row, and its training split."""
    task, _ = set_up(data / FOLDERS.get(name, name), *COMMANDS[name].split(), *arguments)
    task.load_dataset("train")
    return task, task.dataset("train")


def test_every_task_is_here(data: Path) -> None:
    registered = {name for name, task in TASK_REGISTRY.items() if task.__module__.startswith("fairseq_plugin.")}
    assert registered - {GENERATES} == {command.split()[1] for command in COMMANDS.values()}


def _is_padding(name: str, rest: Tensor) -> bool:
    """Whether ``rest`` of a tensor of a batch is what fills it up."""
    wanted = 1 if name.startswith(("src_tokens", "target")) and not rest.is_floating_point() else 0
    return bool((rest == (True if name == "padding_mask" else wanted)).all())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_batch_is_its_items_with_padding_at_the_end(name: str, data: Path) -> None:
    """Each row is the item alone, then padding; counts add up; of no items there is no batch."""
    _, dataset = load(name, data)
    chosen = sorted({0, 1, 2, len(dataset) - 1})  # the last block of a text is short
    batch, alone = dataset.collater([dataset[i] for i in chosen]), [dataset.collater([dataset[i]]) for i in chosen]
    assert batch["id"].tolist() == [int(one["id"]) for one in alone] and not dataset.collater([])
    assert (batch["nsentences"], batch["ntokens"]) == (len(chosen), sum(one["ntokens"] for one in alone))
    padded = 0
    for row, (index, one) in enumerate(zip(chosen, alone)):
        parts = {**one["net_input"], "target": one.get("target")}
        lengths = [x.shape[1] for x in one["net_input"].values() if x is not None and x.dim() > 1]
        assert dataset.num_tokens(index) == dataset.size(index) >= max(lengths)
        assert name == "episodes" or dataset.size(index) == max(lengths)  # windows count as their longest
        for part, x in parts.items():
            joined = {**batch["net_input"], "target": batch.get("target")}[part]
            if x is None:
                continue
            length = x.shape[1] if x.dim() > 1 else None
            assert torch.equal(joined[row : row + 1, :length] if length else joined[row : row + 1], x), part
            if length:
                padded += joined.shape[1] - length
                assert _is_padding(part, joined[row, length:]), part
    assert padded or name == "pixels"  # images have one size


def batches(task, dataset, epoch: int = 1, **options: Any) -> list[list[int]]:
    """The items of each batch of an epoch."""
    options = {"max_sentences": 4, "seed": 1, "disable_iterator_cache": True, **options}
    loader = task.get_batch_iterator(dataset, epoch=epoch, **options)
    return [batch["id"].tolist() for batch in loader.next_epoch_itr(shuffle=False) if batch]


#: Tasks whose batches are the same items in every epoch, and why.
SAME_BATCHES = {
    "streams": "blocks follow each other",
    "pairs": "as those of sentence_prediction",
    "episodes": "an item is drawn anew in each epoch",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_epochs(name: str, data: Path) -> None:
    """Each has all items once, in batches of its own that follow from the seed."""
    task, dataset = load(name, data)
    first, second, again = (batches(task, dataset, epoch) for epoch in (1, 2, 1))
    assert first == again and sorted(sum(first, [])) == list(range(len(dataset)))
    assert (first == second) == (name in SAME_BATCHES)
    assert task.can_reuse_epoch_itr(dataset) == (name in ("streams", "pairs", "text"))  # fairseq then keeps the batches


def test_the_order_of_pairs_is_as_asked_for(data: Path) -> None:
    orders = [batches(*load("pairs", data, *words.split())) for words in ("--seed 1", "--seed 2", "--no-shuffle")]
    assert orders[0] != orders[1] and orders[2] == [[0, 1, 2, 3], [4]]


def test_windows_of_episodes_are_drawn_by_seed_and_epoch(data: Path) -> None:
    drawn = []
    for seed, epoch in (("1", 1), ("1", 1), ("1", 2), ("2", 1)):
        _, dataset = load("episodes", data, "--seed", seed)
        dataset.set_epoch(epoch)
        drawn.append([float(dataset[i]["states"].sum()) for i in range(20)])
    assert drawn[0] == drawn[1] and drawn[1] != drawn[2] and drawn[1] != drawn[3]


@pytest.mark.parametrize("name", COMMANDS)
def test_readers_that_are_spawned_read_the_same(name: str, data: Path) -> None:
    """What torch hands to a reader that is not forked arrives there whole."""
    task, dataset = load(name, data)
    loader = task.get_batch_iterator(dataset, max_sentences=4, seed=1)
    there, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
    for items in loader.frozen_batches:
        found, wanted = collate([there[i] for i in items]), loader.collate_fn([dataset[i] for i in items])
        for part, x in wanted["net_input"].items():
            assert x is found["net_input"][part] is None or torch.equal(x, found["net_input"][part])
        assert {key: x for key, x in found.items() if not isinstance(x, dict | Tensor)} == {
            key: x for key, x in wanted.items() if not isinstance(x, dict | Tensor)
        }


def test_processes_of_a_sequence_read_the_same_batches(data: Path) -> None:
    """Two of four hold each sequence; together they read everything once, and one process all of it."""
    task, dataset = load("text", data)
    places = ((4, 0), (4, 1), (4, 2), (4, 3), (1, 0))
    shards = [batches(task, dataset, num_shards=count, shard_id=i) for count, i in places]
    assert shards[0] == shards[1] != shards[2] == shards[3]
    assert sorted(sum(shards[0] + shards[2], [])) == sorted(sum(shards[4], [])) == list(range(len(dataset)))
    task, dataset = load("text", data, "--lineartime-context-parallel", "3")
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 3; allowed with 4 processes"):
        batches(task, dataset, num_shards=4)
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 3; allowed with 1 process"):
        task.train_step({}, None, None, None, 0)


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name, refused in REFUSED.items() for arguments in refused]
)
def test_command_lines_that_are_refused(name: str, arguments: str, data: Path) -> None:
    """By the task, for its data, its model or its criterion: the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=REFUSED[name][arguments]):
        folder = data / FOLDERS.get(name, name)
        task, config = set_up(folder, *COMMANDS[name].split(), "--num-workers", "0", *arguments.split())
        task.build_model(config.model)
        task.build_criterion(config.criterion)
        task.load_dataset("train")


@pytest.mark.parametrize(("name", "file"), MISSING)
def test_folders_that_lack_a_file(name: str, file: str, data: Path, tmp_path: Path) -> None:
    """What is missing is named, and what makes it."""
    folder = data / FOLDERS.get(name, name)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_relative_to(folder / file):
            (tmp_path / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path.relative_to(folder)).symlink_to(path)
    with pytest.raises(ValueError, match=MISSING[name, file]):
        task, _ = set_up(tmp_path, *COMMANDS[name].split())
        task.load_dataset("train")


def test_pairs_are_two_sequences_and_a_label(data: Path, tmp_path: Path) -> None:
    """Each with the token that stands for the whole, shortened if asked for; parts of other lengths are refused."""
    _, dataset = load("pairs", data, "--no-shuffle")
    batch = dataset.collater([dataset[i] for i in range(len(dataset))])
    first, second = batch["net_input"]["src_tokens"], batch["net_input"]["src_tokens2"]
    assert (first[:, 0] == 0).all() and (second[:, 0] == 0).all() and not torch.equal(first, second)
    assert first.ne(1).sum(1).tolist() == [5, 5, 4, 6, 5] and second.ne(1).sum(1).tolist() == [7, 7, 7, 3, 7]
    assert batch["target"].flatten().tolist() == [0, 1, 0, 1, 0]
    _, short = load("pairs", data, "--max-positions", "4", "--shorten-method", "truncate")
    assert max(short.size(i) for i in range(len(short))) == 4
    folder = tmp_path / "pairs" / "data-bin"
    (folder / "input1").mkdir(parents=True)
    for kind in ("input0", "label"):
        (folder / kind).symlink_to(data / "pairs" / "data-bin" / kind)
    for ending in ("bin", "idx"):  # the letters of all examples in the place of the second sequences
        (folder / "input1" / f"train.{ending}").symlink_to(data / "text" / f"train.{ending}")
    with pytest.raises(ValueError, match=r"\[5, 8, 5\] .*allowed"):
        load("pairs", tmp_path)


@pytest.mark.parametrize("option", ["--separator-token=2", "--add-prev-output-tokens", "--d2v2-multi"])
def test_options_of_joined_sentences_are_not_there(option: str, data: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        load("pairs", data, option)
    assert option.partition("=")[0] in capsys.readouterr().err
