"""Batch rows as streams: each block once, in its row; resuming requires the same number of rows."""

import numpy as np
import pytest
import torch
from fairseq.data import MonolingualDataset, TokenBlockDataset

from fairseq_plugin.data.streams import PLACE, StreamBatchIterator, StreamRows
from tests.fairseq_plugin.helpers.text import dictionary, tokens

SHAPES = [(1, 1, 1), (7, 1, 1), (12, 4, 2), (13, 4, 2), (15, 4, 4), (23, 6, 3), (6, 6, 2), (100, 8, 2)]


@pytest.mark.parametrize("blocks, rows, shards", SHAPES)
def test_each_row_reads_its_part_from_beginning_to_end(blocks: int, rows: int, shards: int) -> None:
    """Rows are parts of the text of nearly equal length; a batch has the first rows of the batch before."""
    layout = StreamRows(blocks, rows, 5)
    batches = layout.batches(shards)
    assert len(batches) == layout.steps * shards
    tokens_read = [[] for _ in range(rows)]
    for number, batch in enumerate(batches):
        step, shard = divmod(number, shards)
        for block_row, block in enumerate(batch):
            row = shard * (rows // shards) + block_row
            assert layout.place(block) == (row, step)
            tokens_read[row].append(block)
    assert sum(tokens_read, []) == list(range(blocks))
    assert max(map(len, tokens_read)) - min(map(len, tokens_read)) <= 1
    assert [len(row) for row in tokens_read] == sorted(map(len, tokens_read), reverse=True)


def test_more_rows_than_blocks_are_refused() -> None:
    """The error names the options of the command line."""
    with pytest.raises(ValueError, match="--batch-size .* 9 streams .* allowed: from 1 to 8"):
        StreamRows(8, 9, 64)


def _dataset(length: int, block: int) -> MonolingualDataset:
    lines = list(tokens(1, length)[0].split(7))
    sizes = np.array([len(line) for line in lines])
    blocks = TokenBlockDataset(lines, sizes, block, pad=1, eos=2, break_mode="none", include_targets=True)
    return MonolingualDataset(blocks, blocks.sizes, dictionary(), shuffle=True, targets=["future"])


def _iterator(length: int = 101, block: int = 5, rows: int = 4, shards: int = 1, shard: int = 0, **options):
    dataset = _dataset(length, block)
    return StreamBatchIterator(dataset, StreamRows(len(dataset), rows, block), shards, shard_id=shard, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shard", [0, 1])
def test_batches_of_a_process(workers: int, shard: int) -> None:
    """Each row is a consecutive part of the text, even if shuffling is on; the last block is padded."""
    iterator = _iterator(shards=2, shard=shard, num_workers=workers)
    text, tokens_read = tokens(1, 101)[0], [[], []]
    for step, batch in enumerate(iterator.next_epoch_itr(shuffle=True)):
        if not batch:
            assert step == 5
            continue
        assert (batch[PLACE].step, batch[PLACE].steps, batch[PLACE].row) == (step, 6, 2 * shard)
        for row, target in enumerate(batch["target"]):
            tokens_read[row].append(target[target.ne(1)])
    # 21 blocks: six in the first row, five in the others.
    bounds = [(0, 30), (30, 55)] if shard == 0 else [(55, 80), (80, 101)]
    for row, (begin, end) in zip(tokens_read, bounds):
        assert torch.equal(torch.cat(row), text[begin:end])


def test_it_goes_on_in_the_middle_of_an_epoch() -> None:
    """Resumes with the next batch, for the same total number of rows and any number of processes."""
    whole = [batch["id"].tolist() for batch in _iterator().next_epoch_itr()]
    stopped = _iterator()
    batches = stopped.next_epoch_itr()
    assert [next(batches)["id"].tolist() for _ in range(3)] == whole[:3]
    state, resumed = stopped.state_dict(), _iterator(num_workers=1)
    resumed.load_state_dict(state)
    assert [batch["id"].tolist() for batch in resumed.next_epoch_itr()] == whole[3:]
    halves = [_iterator(shards=2, shard=shard) for shard in (0, 1)]
    for half in halves:
        half.load_state_dict(state)
    numbers = [[batch.get("id", torch.empty(0)).tolist() for batch in half.next_epoch_itr()] for half in halves]
    assert [first + second for first, second in zip(*numbers)] == whole[3:]


def test_it_does_not_go_on_with_other_rows() -> None:
    """Other rows or blocks are refused in mid-epoch; the message names the option."""
    stopped = _iterator()
    batches = stopped.next_epoch_itr()
    next(batches)
    state = stopped.state_dict()
    for changes, match in (
        ({"block": 6}, "--tokens-per-sample is 6, and was 5"),
        ({"rows": 5}, "--batch-size times the processes is 5, and was 4"),
        ({"length": 120}, "blocks in the data is 24, and was 21"),
    ):
        with pytest.raises(ValueError, match=f"{match}.*allowed.*--reset-dataloader"):
            _iterator(**changes).load_state_dict(state)
    without = {name: x for name, x in state.items() if name != "rows"}
    with pytest.raises(ValueError, match="of another --task"):
        _iterator().load_state_dict(without)
    for _ in batches:
        pass
    _iterator(rows=5).load_state_dict(stopped.state_dict())
