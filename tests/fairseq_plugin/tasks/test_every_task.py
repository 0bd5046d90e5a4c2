"""Every task: batches with padding, order of epochs, spawned readers, two processes as one, and what it refuses."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from torch import Tensor

from fairseq_plugin.data.pixels import SHAPE_FILE
from tests.common.parallel.processes import Processes
from tests.compare import assert_all_close
from tests.fairseq_plugin.helpers import unequal_batches
from tests.fairseq_plugin.helpers.tasks import COMMANDS, typed

pytestmark = pytest.mark.usefixtures("plain_pytorch")
#: A training of each task.
TASKS = ("pixels", "spans", "pairs", "series", "episodes", "context_parallel", "streams", "prompted")
every_task = pytest.mark.parametrize("name", TASKS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small data for every task."""
    return unequal_batches.write(tmp_path_factory.mktemp("tasks"))


def load(name: str, data: Path, *arguments: str):
    """The task of a training, and its training split."""
    task, _ = typed(name, data, *arguments)
    task.load_dataset("train")
    return task, task.dataset("train")


def test_every_task_and_criterion_is_here_and_logs_one_kind(data: Path) -> None:
    """fairseq sums numbers and tensors of a log apart, in the order in which they stand there."""
    built = [unequal_batches.build(name, data) for name in unequal_batches.CASES]
    for registry, kind in ((TASK_REGISTRY, "task"), (CRITERION_REGISTRY, "criterion")):
        ours = {x for x in registry.values() if x.__module__.startswith("fairseq_plugin.")}
        assert ours <= {type(getattr(training, kind)) for training in built}
    ours = {name for name, x in TASK_REGISTRY.items() if x.__module__.startswith("fairseq_plugin.")}
    assert ours == {COMMANDS[name].partition("--task ")[2].split()[0] for name in TASKS}
    for training in built:
        batches = (training.updates(2, rank)[0][0] for rank in range(2))
        logs = (training.criterion(training.model, batch)[2] for batch in batches)
        first, second = ([(name, isinstance(x, Tensor)) for name, x in log.items()] for log in logs)
        assert first == second


def is_padding(name: str, rest: Tensor) -> bool:
    """Whether ``rest`` of a tensor of a batch is what fills it up."""
    wanted = 1 if name.startswith(("src_tokens", "target")) and not rest.is_floating_point() else 0
    return bool((rest == (True if name == "padding_mask" else wanted)).all())


@every_task
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
                assert is_padding(part, joined[row, length:]), part
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


@every_task
def test_epochs(name: str, data: Path) -> None:
    """Each has all items once, in batches of its own that follow from the seed; spawned readers read the same."""
    task, dataset = load(name, data)
    first, second, again = (batches(task, dataset, epoch) for epoch in (1, 2, 1))
    assert first == again and sorted(sum(first, [])) == list(range(len(dataset)))
    assert (first == second) == (name in SAME_BATCHES)
    kept = ("streams", "pairs", "context_parallel", "prompted")  # as fairseq keeps their batches
    assert task.can_reuse_epoch_itr(dataset) == (name in kept)
    loader = task.get_batch_iterator(dataset, max_sentences=4, seed=1)
    there, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
    for items in loader.frozen_batches:
        found, wanted = collate([there[i] for i in items]), loader.collate_fn([dataset[i] for i in items])
        for part, x in wanted["net_input"].items():
            assert x is found["net_input"][part] is None or torch.equal(x, found["net_input"][part])
        others = [{key: x for key, x in y.items() if not isinstance(x, dict | Tensor)} for y in (found, wanted)]
        assert others[0] == others[1]


def test_what_is_drawn_follows_the_options(data: Path) -> None:
    """The order of pairs, and windows of episodes, by seed and epoch."""
    orders = [batches(*load("pairs", data, *words.split())) for words in ("--seed 1", "--seed 2", "--no-shuffle")]
    assert orders[0] != orders[1] and orders[2] == [[0, 1, 2, 3], [4]]
    drawn = []
    for seed, epoch in (("1", 1), ("1", 1), ("1", 2), ("2", 1)):
        _, dataset = load("episodes", data, "--seed", seed)
        dataset.set_epoch(epoch)
        drawn.append([float(dataset[i]["states"].sum()) for i in range(20)])
    assert drawn[0] == drawn[1] and drawn[1] != drawn[2] and drawn[1] != drawn[3]


# ---- Several processes


@pytest.fixture(scope="module")
def settings(data: Path):
    return unequal_batches.configuration(data)


@pytest.fixture(scope="module")
def printed(data: Path, settings) -> list[str]:
    """Train all cases in two processes, one case after another, which takes the seconds."""
    processes = Processes(2, data, unequal_batches.save_all, str(data), settings)
    processes.wait()
    return processes.printed()


@pytest.mark.parametrize("name", unequal_batches.CASES)
def test_two_processes_are_one(name: str, data: Path, settings, printed: list[str]) -> None:
    """Also if the batch of one has padding, or it has no batch left: the same logs and weights."""
    one = unequal_batches.train(name, data, settings)
    files = [data / f"{name}.{rank}.pt" for rank in range(2)]
    assert all(file.exists() for file in files), "\n".join(text[-2000:] for text in printed)
    two = [torch.load(file) for file in files]
    assert name in ("pixels", "context_parallel") or any(two[1]["padding"])
    assert not any(two[0]["padding"])
    for each in two:
        for found, expected in zip(each["logs"], one["logs"], strict=True):
            assert "loss" in found and found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert_all_close(one["weights"], each["weights"].values(), one["weights"].values(), 1e-5)


def test_a_process_that_is_lost_is_named(data: Path, settings, tmp_path: Path) -> None:
    """One of two that hold a sequence is killed after its last message, where fairseq would reduce next."""
    processes = Processes(2, tmp_path, unequal_batches.one_is_killed, str(data), settings)
    codes = processes.wait(60)
    assert 0 not in codes and None not in codes
    assert "process 0, rank 0 of 2 that train together, has lost process 1, which ended" in processes.printed()[0]


def test_processes_of_a_sequence_read_the_same_batches(data: Path) -> None:
    """Two of four hold each sequence; together they read everything once, and one process all of it."""
    task, dataset = load("context_parallel", data)
    places = ((4, 0), (4, 1), (4, 2), (4, 3), (1, 0))
    shards = [batches(task, dataset, max_sentences=2, num_shards=count, shard_id=i) for count, i in places]
    assert shards[0] == shards[1] != shards[2] == shards[3]
    assert sorted(sum(shards[0] + shards[2], [])) == sorted(sum(shards[4], [])) == list(range(len(dataset)))
    task, dataset = load("context_parallel", data, "--lineartime-context-parallel", "3")
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 3; allowed with 4 processes"):
        batches(task, dataset, num_shards=4)
    with pytest.raises(ValueError, match="--lineartime-context-parallel is 3; allowed with 1 process"):
        task.train_step({}, None, None, None, 0)


# ---- What is refused

TRANSFER = "--arch hedgehog_lm --criterion attention_transfer --teacher README.md".split()
#: A training, arguments that the task refuses, for its data, its model or its criterion, and what it says of them.
REFUSED = """
pixels --tokens-per-sample 59 | --tokens-per-sample is 59 .*--context-window, if given.*; allowed: 60
pixels --sample-break-mode eos | --sample-break-mode is eos; allowed with --task pixel_modeling: none
pixels --shorten-method truncate | --shorten-method is truncate; allowed
pixels --add-bos-token | --add-bos-token is True; allowed
pixels --past-target | --past-target is True; allowed
pixels --self-target | --self-target is True; allowed
pixels --pad-to-fixed-bsz | --pad-to-fixed-bsz is True; allowed
pixels --output-dictionary-size 100 | --output-dictionary-size is 100; allowed
pixels --pixel-max-shift -1 | --pixel-max-shift is -1; allowed: 0..255
pixels --pixel-max-shift 256 | --pixel-max-shift is 256; allowed: 0..255
spans --max-positions 9 | --max-positions is 9; allowed: at least 10, for <s>, a question of 6 tokens
spans --max-positions 0 | --max-positions is 0; allowed
spans --max-question-length 0 | --max-question-length is 0; allowed
spans --max-answer-length 0 | --max-answer-length is 0; allowed
spans --span-stride 0 | --span-stride is 0; allowed
spans --span-stride 24 | --span-stride is 24; allowed: at most 23, the tokens of a document in a window of 32
spans --arch flow_classifier | --arch is flow_classifier; allowed with --task span_extraction: roberta
spans --arch flow_time_series | --arch is flow_time_series; allowed with --task span_extraction: roberta
spans --criterion sentence_prediction | --criterion is sentence_prediction; allowed with --task span_extraction
pairs --num-classes 0 | --num-classes is 0
pairs --max-positions 0 | --max-positions is 0
pairs --regression-target | --regression-target is given; allowed with --task sequence_pair_prediction
pairs --criterion cross_entropy | --criterion is cross_entropy; allowed with --task sequence_pair_pred
series --max-length 0 | --max-length is 0; allowed
series --arch flow_classifier | --arch is flow_classifier; allowed .*: .*flowformer_time_series
series --criterion cross_entropy | --criterion is cross_entropy; allowed .*: sentence_prediction
series --regression-target | --regression-target is given; allowed with --task time_series_classification
episodes --context 0 | --context is 0.*; allowed
episodes --context all | --context is all.*; allowed
episodes --max-episode-length 0 | --max-episode-length is 0.*; allowed
episodes --max-episode-length 11 | episode 0 of train has 12 steps; allowed: at most 11, --max-episode-length
episodes --windows-per-epoch 0 | --windows-per-epoch is 0.*; allowed
episodes --return-scale 0 | --return-scale is 0.*; allowed
episodes --arch transformer_lm | --arch is transformer_lm; allowed .*: .*flowformer_decision
episodes --criterion cross_entropy | --criterion is cross_entropy; allowed .*: action_mse
awac --criterion action_mse | --criterion is action_mse; allowed .* this --arch: awac
episodes --criterion awac | --criterion is awac; allowed .* this --arch: action_mse
context_parallel --lineartime-context-parallel 0 | --lineartime-context-parallel is 0; allowed
context_parallel --lineartime-context-timeout 0 | --lineartime-context-timeout is 0; allowed
context_parallel --past-target | --lineartime-context-parallel is 2; allowed with .*--past-target
context_parallel --sentence-avg | --sentence-avg is given; allowed
context_parallel --lineartime-reset-at-eos | --lineartime-reset-at-eos is given; allowed with .*-parallel 2: not given
context_parallel --arch softmax_lm | --lineartime-context-parallel is 2, and .*allowed.* flow,
context_parallel --arch transformer_lm | --lineartime-context-parallel is 2, and .*allowed.* flow,
context_parallel --arch flash_quad_lm | --lineartime-context-parallel is 2, and .*allowed.* flow,
streams --sample-break-mode eos | --sample-break-mode is eos; allowed .* none
streams --add-bos-token | --add-bos-token is True; allowed
streams --shorten-method truncate | --shorten-method is truncate
streams --self-target | --self-target is True
streams --past-target | --past-target is True
streams --arch softmax_lm | 'softmax' attention, whose state grows
streams --arch flash_quad_lm --flash-relative-bias rotary | GatedAttentionUnit' attention, whose state grows
streams --arch rfa_lm | 'rfa' attention, which draws anew
streams --arch favor_lm --favor-redraw 5 | 'favor' attention, which draws anew
streams --decoder-layerdrop 0.1 | --decoder-layerdrop is 0.1; allowed .* 0
streams --decoder-learned-pos | positions or distances of .* --decoder-learned-pos
streams --arch daft_full_lm | positions or distances
streams --arch transformer_lm | TransformerLanguageModel; allowed .* language models of this plugin
streams --arch hedgehog_lm --criterion attention_transfer --teacher x.pt | --task is [Ss]treaming.*; allowed .*: lang
prompted --arch hedgehog_lm --criterion attention_transfer | --teacher is not given; allowed
transfer --teacher x.pt | --teacher is 'x.pt', which is no file; all
prompted --criterion distillation | --teacher is not given; allowed
prompted --criterion distillation --teacher x.pt --distillation-temperature 0 | --distillation-temperature is 0.0; allow
prompted --criterion distillation --teacher x.pt --distillation-weight 1.1 | --distillation-weight is 1.1; allowed
prompted --criterion distillation --teacher x.pt --ddp-backend fully_sharded | --ddp-backend is fully_sharded; allowed
transfer --transfer-window-dropout 1.5 | --transfer-window-dropout is 1.5; allowed: 0 to 1
transfer --ddp-backend fully_sharded | --ddp-backend is fully_sharded; allowed .*: legacy_ddp
transfer --distributed-world-size 2 --ddp-backend pytorch_ddp | --ddp-backend is pytorch_ddp; allowed .*: legacy_ddp
awac --awac-lambda 0 | --awac-lambda is 0.0; allowed
awac --awac-max-weight inf | --awac-max-weight is inf; allowed
awac --awac-discount 1.5 | --awac-discount is 1.5; allowed
awac --context 1 | --context is 1; allowed
masked --criterion span_extraction | --task is [Mm]asked.*; allowed with --criterion span_extraction
sparse_cross_entropy --entropy-weight -1 | --entropy-weight is -1.0; allowed
sparse_cross_entropy --entropy-weight nan | --entropy-weight is nan; allowed
sparse_cross_entropy --entropy-weight inf | --entropy-weight is inf; allowed
""".strip().splitlines()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.rpartition(" | ")[0])
def test_command_lines_that_are_refused(row: str, data: Path) -> None:
    """The argument, its value and what is allowed."""
    (name, *arguments), said = row.split(" | ")[0].split(), row.split(" | ")[1]
    if name == "transfer":
        name, arguments = "prompted", [*TRANSFER, *arguments]
    with pytest.raises(ValueError, match=said):
        task, args = typed(name, data, *arguments)
        task.build_model(args)
        task.build_criterion(args)
        task.load_dataset("train")


#: A training, a file that is missing, and what the message says of it.
MISSING = rf"""
pixels | {SHAPE_FILE} | lacks {SHAPE_FILE}; allowed
spans | dict.txt | dict.txt does not exist; allowed: a folder that .*recipes.triviaqa.data
pairs | input0/dict.txt | input0.dict.txt does not exist; allowed.*--destdir .*input0
pairs | label/dict.txt | label.dict.txt does not exist; allowed.*--destdir .*label
pairs | input1 | input1.train.idx does not exist; allowed.*fairseq-preprocess .*--srcdict
series | series.json | lacks series.json
series | train.npz | no split train; allowed: test
episodes | episodes.json | lacks episodes.json
""".strip().splitlines()


@pytest.mark.parametrize("row", MISSING, ids=lambda row: row.rpartition(" | ")[0])
def test_folders_that_lack_a_file(row: str, data: Path, tmp_path: Path) -> None:
    """What is missing is named, and what makes it."""
    name, file, said = row.split(" | ")
    part = COMMANDS[name].split()[0]
    for path in (data / part).rglob("*"):
        if path.is_file() and not path.is_relative_to(data / part / file):
            (tmp_path / path.relative_to(data)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path.relative_to(data)).symlink_to(path)
    with pytest.raises(ValueError, match=said):
        load(name, tmp_path)


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
