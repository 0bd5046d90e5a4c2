"""Streams: rows of batches are texts from beginning to end, and training is the literal one, token by token.

Refused models and options are in test_every_task.py, resumed trainings in ../commands/test_resumption.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import MonolingualDataset, TokenBlockDataset
from fairseq.distributed import ModuleProxyWrapper
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugin.data.streams import PLACE, StreamBatchIterator, StreamRows
from fairseq_plugin.modules.carried_state import CarriedState
from fairseq_plugin.tasks.streaming_language_modeling import check_streams
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.kinds import build
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.tasks import typed, write
from tests.fairseq_plugin.helpers.text import PAD, dictionary, tokens
from tests.processes import end_readers

pytestmark = pytest.mark.usefixtures("plain_pytorch")


@pytest.fixture(autouse=True)
def readers_end():
    """fairseq leaves them, and torch waits five seconds for each when they are collected."""
    yield
    end_readers()


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


def iterate(length: int = 101, block: int = 5, rows: int = 4, shards: int = 1, shard: int = 0, **options):
    """Over 21 blocks of a text: six in the first row and five in the others."""
    lines = list(tokens(1, length)[0].split(7))
    sizes = np.array([len(line) for line in lines])
    blocks = TokenBlockDataset(lines, sizes, block, pad=PAD, eos=2, break_mode="none", include_targets=True)
    dataset = MonolingualDataset(blocks, blocks.sizes, dictionary(), shuffle=True, targets=["future"])
    return StreamBatchIterator(dataset, StreamRows(len(dataset), rows, block), shards, shard_id=shard, **options)


@pytest.mark.parametrize(("workers", "shard", "bounds"), [(0, 0, [(0, 30), (30, 55)]), (2, 1, [(55, 80), (80, 101)])])
def test_batches_of_a_process(workers: int, shard: int, bounds: list[tuple[int, int]]) -> None:
    """Rows are parts of the text even if batches are to be shuffled; the last block is padded."""
    iterator, read = iterate(shards=2, shard=shard, num_workers=workers), [[], []]
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
    whole = [batch["id"].tolist() for batch in iterate().next_epoch_itr()]
    stopped = iterate()
    batches = stopped.next_epoch_itr()
    assert next(batches)["id"].tolist() == whole[0]
    state = stopped.state_dict()
    for shards in (1, 2):
        parts = [iterate(shards=shards, shard=shard, num_workers=1) for shard in range(shards)]
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
            iterate(**changes).load_state_dict(state)
    with pytest.raises(ValueError, match="of another --task"):
        iterate().load_state_dict({name: x for name, x in state.items() if name != "rows"})
    for _ in batches:
        pass
    iterate(rows=5).load_state_dict(stopped.state_dict())  # a new epoch may have other rows


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
BLOCK = 21


def model_of(arch: str, *arguments: str, dropout: str = "0") -> nn.Module:
    options = ["--dropout", dropout, "--attention-dropout", dropout, "--activation-dropout", dropout]
    return awake(build_model(arch, *ARCHITECTURES.get(arch, ()), *options, *arguments))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The sum over real tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


def in_blocks(model: nn.Module, sequence: Tensor, sizes: int | list[int]) -> tuple[Tensor, list[int]]:
    """Logits of a text by blocks, each after the one before, and the numbers in the state after each."""
    before, logits, entries = None, [], []
    for block in sequence.split(sizes, dim=1):
        carried = CarriedState(before)
        logits.append(model(block, incremental_state=carried)[0])
        before = carried.after
        assert all(x.grad_fn is None for state in before.values() for x in state.values() if x is not None)
        entries.append(sum(x.numel() for state in before.values() for x in state.values() if x is not None))
    return torch.cat(logits, dim=1), entries


def token_by_token(model: nn.Module, sequence: Tensor) -> Tensor:
    """The literal reference: fairseq's steps of one token through the text; the state is detached after each block."""
    state: dict[str, dict[str, Tensor | None]] = {}
    logits = []
    for end in range(1, sequence.shape[1] + 1):
        logits.append(model(sequence[:, :end], incremental_state=state)[0])
        if end % BLOCK == 0:
            for entries in state.values():
                entries.update({name: x if x is None else x.detach() for name, x in entries.items()})
    return torch.cat(logits, dim=1)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "softmax_lm", "favor_lm"])
@torch.no_grad()
def test_blocks_are_the_whole_text(arch: str) -> None:
    """Of any length; beyond the --tokens-per-sample of 256. Neither states nor tables of positions grow."""
    model, sequence = model_of(arch).eval(), tokens(2, 320)
    whole, tables = model(sequence)[0], getattr(model.decoder.embed_positions, "weights", torch.empty(0)).numel()
    for sizes in ([1, 100, 7, 212], 64):
        logits, entries = in_blocks(model, sequence, sizes)
        assert_close(f"blocks of {sizes}", logits, whole, 2e-5)
    assert len(set(entries[2:])) == 1 or arch == "softmax_lm"
    assert getattr(model.decoder.embed_positions, "weights", torch.empty(0)).numel() == tables


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_training_is_that_of_one_sequence_with_detached_states(arch: str) -> None:
    """Losses and gradients of all blocks of two rows, the second of which ends earlier; also recomputed ones."""
    model, sequence = model_of(arch).train(), tokens(2, BLOCK * 3 + 1)
    source, target = sequence[:, :-1].clone(), sequence[:, 1:].clone()
    source[1, -8:] = target[1, -8:] = PAD
    expected = loss_of(token_by_token(model, source), target)
    literal, whole = gradients(model, expected), gradients(model, loss_of(model(source)[0], target))
    recomputing = model_of(arch, "--checkpoint-activations").train()
    recomputing.load_state_dict(model.state_dict())
    for each in (model, recomputing):
        found = loss_of(in_blocks(each, source, BLOCK)[0], target)
        assert_close("loss", found, expected, 1e-5)
        ours = gradients(each, found)
        assert literal.keys() == ours.keys()
        for name, gradient in literal.items():
            assert_close(name, ours[name], gradient, 2e-4)
    assert any((whole[name] - x).norm() > 1e-2 * x.norm() for name, x in ours.items())  # it is truncated


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "daft_conv_lm"])
def test_dropout_is_that_of_the_forward_pass(arch: str) -> None:
    """With the same draws a first block is fairseq's, also a recomputed one."""
    block, results = tokens(2, 20), []
    for more, state in (((), None), ((), CarriedState()), (("--checkpoint-activations",), CarriedState())):
        model = model_of(arch, "--decoder-layers", "1", *more, dropout="0.4").train()
        torch.manual_seed(3)
        loss = model(block, incremental_state=state)[0].square().sum()
        results.append((loss.detach(), gradients(model, loss)))
    for loss, found in results[1:]:
        assert_close("loss", loss, results[0][0], 1e-5)
        for name, gradient in results[0][1].items():
            assert_close(name, found[name], gradient, 1e-4, floor=1.0)  # the bias of DAFT's keys cancels


# ---- The task


class Optimizer:
    """What a task asks of an optimizer."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("streams"))


def streaming(data: Path, batch_size: int = 3) -> tuple:
    """The task, the batches of an epoch, and the criterion."""
    task, args = typed("streams", data)
    task.load_dataset("train")
    iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=batch_size)
    return task, list(iterator.next_epoch_itr()), task.build_criterion(args)


def descend(model: nn.Module) -> None:
    """A step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None


def test_the_task_trains_as_the_literal_loop(data: Path) -> None:
    """A whole epoch of rows of unequal lengths; repeated, ignored and validated batches change nothing."""
    task, batches, criterion = streaming(data)
    literal, ours = (model_of("flowformer_lm").train() for _ in range(2))
    assert [len(batch["target"]) for batch in batches] == [3, 3, 2]
    for before, after in zip(batches, batches[1:]):  # a row goes on with the token that was its last target
        rows = len(after["target"])
        assert torch.equal(before["target"][:rows, -1], after["net_input"]["src_tokens"][:, 0])
    carried, expected, found = CarriedState(), [], []
    for batch in batches:
        rows = len(batch["target"])
        before = {x: {y: z if z is None else z[:rows] for y, z in e.items()} for x, e in (carried.after or {}).items()}
        carried = CarriedState(before or None)
        loss = loss_of(literal(batch["net_input"]["src_tokens"], incremental_state=carried)[0], batch["target"])
        loss.backward()
        descend(literal)
        expected.append(loss.item())
    for update, batch in enumerate(batches):
        task.train_step(batch, ours, criterion, Optimizer(), update)  # an overflow: it comes again
        ours.zero_grad()
        found.append(task.train_step(batch, ours, criterion, Optimizer(), update)[0].item())
        descend(ours)
        task.train_step(batches[0], ours, criterion, Optimizer(), update, ignore_grad=True)
        ours.zero_grad()
        task.valid_step(batches[update], ours, criterion)
        ours.train()
    assert found == pytest.approx(expected, rel=1e-4)
    for one, other in zip(ours.parameters(), literal.parameters()):
        assert_close("weights", one, other, 1e-4)


@torch.no_grad()
def losses_of(model: nn.Module, batches: list[dict]) -> list[float]:
    """Losses of batches without any update, by the whole forward pass."""
    logits = model(torch.cat([x["net_input"]["src_tokens"] for x in batches], dim=1))[0]
    return [float(loss_of(x, y["target"])) for x, y in zip(logits.split(8, dim=1), batches)]


def test_batches_of_an_update_are_repeated_from_its_first(data: Path) -> None:
    """--update-freq 3: after an overflow all three come again, and go on from the states that they went on from."""
    task, batches, criterion = streaming(data, batch_size=1)
    model = model_of("flowformer_lm").train()

    def update(number: int, own: list[dict]) -> list[float]:
        return [float(task.train_step(x, model, criterion, Optimizer(), number)[0].detach()) for x in own]

    found = [update(0, batches[:1]), update(1, batches[1:4]), update(1, batches[1:4]), update(2, batches[4:6])]
    assert found[1] == found[2]
    assert [*found[0], *found[2], *found[3]] == pytest.approx(losses_of(model, batches[:6]), rel=1e-5)


@pytest.mark.parametrize("how", ["--fp16", "--ddp-backend c10d"])
def test_other_ways_to_train(how: str, data: Path, tmp_path: Path) -> None:
    """What is carried stays in float32 beside a model of halves; torch's wrapper of processes hands it on as it is."""
    task, batches, criterion = streaming(data, batch_size=2)
    model = model_of("flowformer_lm").train()
    expected, trained = losses_of(model, batches[:3]), model
    if how == "--fp16":
        trained = model.half()
    else:
        store = f"file://{tmp_path / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        trained = ModuleProxyWrapper(DistributedDataParallel(model))
    try:
        steps = [task.train_step(x, trained, criterion, Optimizer(), i)[0] for i, x in enumerate(batches[:3])]
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert [float(x.detach()) for x in steps] == pytest.approx(expected, rel=1e-2 if how == "--fp16" else 1e-5)


def test_what_a_stream_cannot_have_is_refused(data: Path) -> None:
    """More rows than blocks, and a window: its context is everything; models that end are, in evaluation too."""
    with pytest.raises(ValueError, match="10000 streams .* allowed: from 1 to"):
        streaming(data, batch_size=10_000)
    task, _, _ = streaming(data)
    with pytest.raises(ValueError, match="--context-window is 8; allowed"):
        task.eval_lm_dataloader(task.dataset("train"), context_window=8)
    for arch in ("flow", "daft_full_lm", "transformer_lm"):
        with pytest.raises(ValueError, match="allowed with --task streaming_language_modeling"):
            check_streams(build(arch), training=False)
    for arch in ("softmax_lm", "rfa_lm"):  # their state grows, or is drawn anew in training alone
        check_streams(build(arch, "--decoder-layerdrop", "0.1"), training=False)
