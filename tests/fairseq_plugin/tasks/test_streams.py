"""Streams: rows of batches are texts from beginning to end, and training is the literal one, token by token.

Refused models and options are in test_every_task.py, resumed trainings in ../commands/test_resumption.py.
"""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.distributed import ModuleProxyWrapper
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugin import StreamingLanguageModelingTask
from fairseq_plugin.data.streams import PLACE, StreamBatchIterator, StreamRows
from fairseq_plugin.modules.carried_state import CarriedState
from fairseq_plugin.tasks.streaming_language_modeling import check_streams
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.encoder_decoders import build_model as build_encoder_decoder
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.text import PAD, dictionary, tokens

# ---- Batches


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 40))
def test_each_row_reads_its_part_from_beginning_to_end(shards: int, own_rows: int, further: int) -> None:
    """Parts of nearly equal length, longer ones first; a batch has the first rows of the batch before."""
    rows = shards * own_rows
    layout = StreamRows(rows + further, rows, 5)
    read: list[list[int]] = [[] for _ in range(rows)]
    for number, batch in enumerate(layout.batches(shards)):
        step, shard = divmod(number, shards)
        for i, block in enumerate(batch):
            assert layout.place(block) == (shard * own_rows + i, step)
            read[shard * own_rows + i].append(block)
    assert sum(read, []) == list(range(layout.blocks)) and number + 1 == layout.steps * shards
    lengths = [len(row) for row in read]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def _iterator(length: int = 101, block: int = 5, rows: int = 4, shards: int = 1, shard: int = 0, **options):
    """Over 21 blocks of a text: six in the first row and five in the others."""
    lines = list(tokens(1, length)[0].split(7))
    sizes = np.array([len(line) for line in lines])
    blocks = TokenBlockDataset(lines, sizes, block, pad=PAD, eos=2, break_mode="none", include_targets=True)
    dataset = MonolingualDataset(blocks, blocks.sizes, dictionary(), shuffle=True, targets=["future"])
    return StreamBatchIterator(dataset, StreamRows(len(dataset), rows, block), shards, shard_id=shard, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("shard", "bounds"), [(0, [(0, 30), (30, 55)]), (1, [(55, 80), (80, 101)])])
def test_batches_of_a_process(workers: int, shard: int, bounds: list[tuple[int, int]]) -> None:
    """Rows are parts of the text even if batches are to be shuffled; the last block is padded."""
    iterator, read = _iterator(shards=2, shard=shard, num_workers=workers), [[], []]
    for step, batch in enumerate(iterator.next_epoch_itr(shuffle=True)):
        if not batch:
            assert step == 5
            continue
        assert (batch[PLACE].step, batch[PLACE].steps, batch[PLACE].row) == (step, 6, 2 * shard)
        for row, target in enumerate(batch["target"]):
            read[row].append(target[target.ne(PAD)])
    for row, (begin, end) in zip(read, bounds):
        assert torch.equal(torch.cat(row), tokens(1, 101)[0][begin:end])


def test_it_goes_on_in_the_middle_of_an_epoch() -> None:
    """With the next batch, for any number of processes that have as many rows together; others are refused."""
    whole = [batch["id"].tolist() for batch in _iterator().next_epoch_itr()]
    stopped = _iterator()
    batches = stopped.next_epoch_itr()
    assert next(batches)["id"].tolist() == whole[0]
    state = stopped.state_dict()
    for shards in (1, 2):
        parts = [_iterator(shards=shards, shard=shard, num_workers=1) for shard in range(shards)]
        for part in parts:
            part.load_state_dict(state)
        numbers = [[batch["id"].tolist() if batch else [] for batch in part.next_epoch_itr()] for part in parts]
        assert [sum(of_step, []) for of_step in zip(*numbers)] == whole[1:]
    for changes, said in (
        ({"block": 6}, "--tokens-per-sample is 6, and was 5"),
        ({"rows": 5}, "--batch-size times the processes is 5, and was 4"),
        ({"length": 120}, "blocks in the data is 24, and was 21"),
    ):
        with pytest.raises(ValueError, match=f"{said}.*allowed.*--reset-dataloader"):
            _iterator(**changes).load_state_dict(state)
    with pytest.raises(ValueError, match="of another --task"):
        _iterator().load_state_dict({name: x for name, x in state.items() if name != "rows"})
    for _ in batches:
        pass
    _iterator(rows=5).load_state_dict(stopped.state_dict())  # a new epoch may have other rows


# ---- Models

#: Of each kind of state one; FLASH's chunks of 16 tokens are no divisors of the blocks.
ARCHITECTURES = {
    "flowformer_lm": (),
    "linear_lm": ("--linear-forget", "head", "--linear-short-conv", "3"),
    "flash_lm": (),
    "gla_lm": (),
    "gated_delta_lm": (),
    "daft_conv_lm": (),
    "local_lm": ("--local-window", "9"),
}
BLOCK, BLOCKS = 21, 3


def _model(arch: str, *arguments: str, dropout: str = "0", words: int = 60) -> nn.Module:
    options = ["--dropout", dropout, "--attention-dropout", dropout, "--activation-dropout", dropout]
    return awake(build_model(arch, *ARCHITECTURES.get(arch, ()), *options, *arguments, words=words))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    """The sum over real tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


def _in_blocks(model: nn.Module, sequence: Tensor, sizes: int | list[int]) -> tuple[Tensor, list[int]]:
    """Logits of a text by blocks, each after the one before, and the numbers in the state after each."""
    before, logits, entries = None, [], []
    for block in sequence.split(sizes, dim=1):
        carried = CarriedState(before)
        logits.append(model(block, incremental_state=carried)[0])
        before = carried.after
        assert all(x.grad_fn is None for state in before.values() for x in state.values() if x is not None)
        entries.append(sum(x.numel() for state in before.values() for x in state.values() if x is not None))
    return torch.cat(logits, dim=1), entries


def _token_by_token(model: nn.Module, sequence: Tensor, block: int) -> Tensor:
    """The literal reference: fairseq's steps of one token through the text; the state is detached after each block."""
    state: dict[str, dict[str, Tensor | None]] = {}
    logits = []
    for end in range(1, sequence.shape[1] + 1):
        logits.append(model(sequence[:, :end], incremental_state=state)[0])
        if end % block == 0:
            for entries in state.values():
                entries.update({name: x if x is None else x.detach() for name, x in entries.items()})
    return torch.cat(logits, dim=1)


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, x in model.named_parameters() if x.requires_grad]
    found = torch.autograd.grad(loss, [model.get_parameter(name) for name in names], allow_unused=True)
    return {name: x for name, x in zip(names, found) if x is not None}


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "softmax_lm", "favor_lm"])
@torch.no_grad()
def test_blocks_are_the_whole_text(arch: str) -> None:
    """Of any length; beyond the --tokens-per-sample of 256. Neither states nor tables of positions grow."""
    model, sequence = _model(arch).eval(), tokens(2, 320)
    whole, tables = model(sequence)[0], getattr(model.decoder.embed_positions, "weights", torch.empty(0)).numel()
    for sizes in ([1, 100, 7, 212], 64):
        logits, entries = _in_blocks(model, sequence, sizes)
        assert_close(f"blocks of {sizes}", logits, whole, 2e-5)
    assert len(set(entries[2:])) == 1 or arch == "softmax_lm"
    assert getattr(model.decoder.embed_positions, "weights", torch.empty(0)).numel() == tables


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_training_is_that_of_one_sequence_with_detached_states(arch: str) -> None:
    """Losses and gradients of all blocks, two rows, the second of which ends earlier."""
    model, sequence = _model(arch).train(), tokens(2, BLOCK * BLOCKS + 1)
    source, target = sequence[:, :-1].clone(), sequence[:, 1:].clone()
    source[1, -8:] = target[1, -8:] = PAD
    expected, found = (
        _loss(_token_by_token(model, source, BLOCK), target),
        _loss(_in_blocks(model, source, BLOCK)[0], target),
    )
    assert_close("loss", found, expected, 1e-5)
    literal, ours = _gradients(model, expected), _gradients(model, found)
    assert literal.keys() == ours.keys()
    for name, gradient in literal.items():
        assert_close(name, ours[name], gradient, 2e-4)
    whole = _gradients(model, _loss(model(source)[0], target))
    assert any((whole[name] - x).norm() > 1e-2 * x.norm() for name, x in ours.items())  # it is truncated


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "daft_conv_lm"])
def test_dropout_is_that_of_the_forward_pass(arch: str) -> None:
    """With the same draws a first block is fairseq's; in evaluation nothing is dropped."""
    model, block, results = _model(arch, "--decoder-layers", "1", dropout="0.4").train(), tokens(2, 20), []
    for state in (None, CarriedState()):
        torch.manual_seed(3)
        loss = model(block, incremental_state=state)[0].square().sum()
        results.append((loss, _gradients(model, loss)))
    assert_close("loss", results[1][0], results[0][0], 1e-5)
    for name, gradient in results[0][1].items():
        assert_close(name, results[1][1][name], gradient, 1e-4, floor=1.0)  # the bias of DAFT's keys cancels
    with torch.no_grad():
        assert_close("evaluation", _in_blocks(model.eval(), block, 7)[0], model(block)[0], 2e-5)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "local_lm"])
def test_recomputed_activations_go_on_from_the_same_state(arch: str) -> None:
    """--checkpoint-activations runs a layer twice, with the same dropout and the same state."""
    found = []
    for more in ((), ("--checkpoint-activations",)):
        model = _model(arch, *more, dropout="0.2").train()
        torch.manual_seed(5)
        loss = _in_blocks(model, tokens(2, 3 * BLOCK), BLOCK)[0].square().mean()
        loss.backward()
        found.append((loss, [x.grad for x in model.parameters() if x.grad is not None]))
    assert_close("loss", found[1][0], found[0][0], 1e-5)
    for one, other in zip(found[1][1], found[0][1], strict=True):
        assert_close("gradient", one, other, 1e-4)


# ---- The task


class _Optimizer:
    """What a task asks of an optimizer."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def _task(data: str, batch_size: int = 12) -> tuple:
    """The task, the batches of an epoch, and the criterion."""
    none = ("use_plasma_view", "plasma_path", "pad_to_fixed_length", "pad_to_fixed_bsz", "batch_size_valid")
    args = {"data": data, "tokens_per_sample": 40, "output_dictionary_size": -1, "dataset_impl": None, "seed": 1}
    args |= {"sample_break_mode": "none", "shorten_method": "none", "shorten_data_split_list": ""}
    args |= {**dict.fromkeys(none), "add_bos_token": False, "batch_size": None}
    task = StreamingLanguageModelingTask.setup_task(Namespace(**args))
    task.load_dataset("train")
    iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=batch_size)
    return task, list(iterator.next_epoch_itr()), CrossEntropyCriterion(task, sentence_avg=False)


def _rows_of_text(data: str, task, rows: int, block: int) -> list[tuple[Tensor, Tensor]]:
    """The literal batches: the text as one array, its rows cut by hand; sources and targets (rows, block)."""
    lines = data_utils.load_indexed_dataset(str(Path(data) / "train"), task.dictionary, None)
    text = np.concatenate([[task.dictionary.eos()], *[line.numpy() for line in lines]])
    count = -(-(len(text) - 1) // block)
    lengths = [count // rows + (row < count % rows) for row in range(rows)]
    batches = []
    for step in range(max(lengths)):
        begins = [(sum(lengths[:row]) + step) * block for row in range(rows) if step < lengths[row]]
        pairs = [torch.from_numpy(text[begin : begin + block + 1].astype(np.int64)) for begin in begins]
        width = max(map(len, pairs))
        batches.append(
            tuple(
                torch.stack([F.pad(part, (0, width - 1 - len(part)), value=PAD) for part in parts])
                for parts in ([pair[:-1] for pair in pairs], [pair[1:] for pair in pairs])
            )
        )
    return batches


def _descend(model: nn.Module) -> None:
    """A step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-4 * parameter.grad
                parameter.grad = None


def _literal_training(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Losses of gradient descent, an update for each batch, one token after another."""
    losses, state, read = [], {}, None
    for source, target in batches:
        rows, logits = len(source), []
        state = {k: {n: x if x is None else x[:rows].detach() for n, x in e.items()} for k, e in state.items()}
        read = source if read is None else torch.cat([read[:rows], source], dim=1)
        for end in range(read.shape[1] - source.shape[1] + 1, read.shape[1] + 1):
            logits.append(model(read[:, :end], incremental_state=state)[0])
        loss = _loss(torch.cat(logits, dim=1), target)
        loss.backward()
        _descend(model)
        losses.append(float(loss.detach()))
    return losses


def test_the_task_trains_as_the_literal_loop(data_bin: str) -> None:
    """A whole epoch of rows of unequal lengths; repeated, ignored and validated batches change nothing.

    Seconds, because the literal loop takes a step for each token.
    """
    task, batches, criterion = _task(data_bin)
    words = len(task.dictionary) - 4
    literal, ours = (_model("flowformer_lm", words=words).train() for _ in range(2))
    expected = _literal_training(literal, _rows_of_text(data_bin, task, 12, 40))
    assert len(expected) == len(batches) > 5
    assert sum(batch["ntokens"] for batch in batches) == int(task.dataset("train").sizes.sum())
    found = []
    for update, batch in enumerate(batches):
        task.train_step(batch, ours, criterion, _Optimizer(), update)  # an overflow: it comes again
        ours.zero_grad()
        found.append(float(task.train_step(batch, ours, criterion, _Optimizer(), update)[0].detach()))
        _descend(ours)
        kept = {name: x.detach().clone() for name, x in ours.named_parameters()}
        task.train_step(batches[0], ours, criterion, _Optimizer(), update, ignore_grad=True)
        task.valid_step(batches[update // 2], ours, criterion)
        ours.train().zero_grad()
        assert all(torch.equal(kept[name], x) for name, x in ours.named_parameters())
    assert found == pytest.approx(expected, rel=1e-4)
    for one, other in zip(ours.parameters(), literal.parameters()):
        assert_close("weights", one, other, 1e-3)


@torch.no_grad()
def _literal_losses(model: nn.Module, batches: list[dict]) -> list[float]:
    """Losses of batches without any update, by the whole forward pass."""
    logits = model(torch.cat([x["net_input"]["src_tokens"] for x in batches], dim=1))[0]
    return [float(_loss(x, y["target"])) for x, y in zip(logits.split(40, dim=1), batches)]


def test_batches_of_an_update_are_repeated_from_its_first(data_bin: str) -> None:
    """--update-freq 3: after an overflow all three come again, and go on from the states that they went on from."""
    task, batches, criterion = _task(data_bin, batch_size=6)
    model = _model("flowformer_lm", words=len(task.dictionary) - 4).train()

    def update(number: int, own: list[dict]) -> list[float]:
        return [float(task.train_step(x, model, criterion, _Optimizer(), number)[0].detach()) for x in own]

    found = [update(0, batches[:1]), update(1, batches[1:4]), update(1, batches[1:4]), update(2, batches[4:6])]
    assert found[1] == found[2]
    assert [*found[0], *found[2], *found[3]] == pytest.approx(_literal_losses(model, batches[:6]), rel=1e-5)


@pytest.mark.parametrize("how", ["--fp16", "--ddp-backend c10d"])
def test_other_ways_to_train(how: str, data_bin: str, tmp_path: Path) -> None:
    """What is carried stays in float32 beside a model of halves; torch's wrapper of processes hands it on as it is."""
    task, batches, criterion = _task(data_bin)
    model = _model("flowformer_lm", words=len(task.dictionary) - 4).train()
    expected, trained = _literal_losses(model, batches[:4]), model
    if how == "--fp16":
        trained = model.half()
    else:
        store = f"file://{tmp_path / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        trained = ModuleProxyWrapper(DistributedDataParallel(model))
    try:
        steps = [task.train_step(x, trained, criterion, _Optimizer(), i)[0] for i, x in enumerate(batches[:4])]
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert [float(x.detach()) for x in steps] == pytest.approx(expected, rel=1e-2 if how == "--fp16" else 1e-5)


def test_what_a_stream_cannot_have_is_refused(data_bin: str) -> None:
    """More rows than blocks, and a window: its context is everything; models that end are, in evaluation too."""
    with pytest.raises(ValueError, match="10000 streams .* allowed: from 1 to"):
        _task(data_bin, batch_size=10_000)
    task, _, _ = _task(data_bin)
    with pytest.raises(ValueError, match="--context-window is 8; allowed"):
        task.eval_lm_dataloader(task.dataset("train"), context_window=8)
    for model in (build_encoder_decoder("flowformer"), build_model("daft_full_lm"), build_model("transformer_lm")):
        with pytest.raises(ValueError, match="allowed with --task streaming_language_modeling"):
            check_streams(model, training=False)
    for arch in ("softmax_lm", "rfa_lm"):  # their state grows, or is drawn anew in training alone
        check_streams(build_model(arch, "--decoder-layerdrop", "0.1"), training=False)
