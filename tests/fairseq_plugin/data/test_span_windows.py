"""Windows over documents: every token is in a window; gold spans cut by a border are dropped; batching."""

import numpy as np
import pytest
import torch

from fairseq_plugin.data.span_windows import SPECIAL_TOKENS, Layout, SpanWindowDataset, lay_windows
from tests.fairseq_plugin.helpers.spans import span_dictionary, split_of


def literal(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """The windows (begin, end) of a document, by a loop."""
    windows, begin = [], 0
    while True:
        windows.append((begin, min(begin + room, length)))
        if begin + room >= length:
            return windows
        begin += stride


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_windows_are_laid_one_after_another(stride):
    """Windows equal the loop for lengths from 1 token to several windows, and two window sizes."""
    lengths = np.arange(1, 40)
    for rooms in (np.full(39, 7), np.where(lengths % 2, 7, 9)):
        windows = lay_windows(lengths, rooms, stride)
        for number, (length, room) in enumerate(zip(lengths, rooms)):
            of_one = windows.pair == number
            assert list(zip(windows.begin[of_one], windows.end[of_one])) == literal(length, room, stride)


def dataset(questions=(3, 9), documents=(23, 5), spans=(((4, 5), (9, 12), (22, 22)), ()), stride=7, positions=16):
    return SpanWindowDataset(split_of(questions, documents, spans), Layout(positions, 5, stride), span_dictionary())


def test_a_window_has_question_separator_and_piece():
    """Long questions are truncated; ``size`` is the number of tokens, by which fairseq forms batches."""
    data = dataset()
    assert len(data) == 3 + 1  # room 10 of 23 tokens: 0-10, 7-17, 14-23; room 8 of 5 tokens
    for index in range(4):
        item = data[index]
        pair = 0 if index < 3 else 1
        length = min(5, (3, 9)[pair])
        begin, end = item["piece"]
        tokens = item["tokens"].tolist()
        assert tokens[0] == 0 and tokens[1 + length] == 2 and tokens[-1] == 2 and len(tokens) == data.size(index) <= 16
        assert tokens[1 : 1 + length] == [i % 20 + 4 for i in range(length)]
        first = int(data.windows.begin[index])
        assert tokens[begin:end] == [i % 20 + 4 for i in range(first, first + end - begin)]
        assert len(tokens) == length + end - begin + SPECIAL_TOKENS
    assert sorted(data.ordered_indices()) == [0, 1, 2, 3]


def test_spans_are_gold_in_the_windows_that_hold_them_whole():
    """Span (9, 12) crosses the border of the first window and is whole in the second."""
    data = dataset()
    spans = [data.gold_spans(index).tolist() for index in range(4)]
    assert spans == [[[4, 5]], [[9, 12]], [[22, 22]], []]
    assert data.lost_spans() == 0
    for index in range(3):
        item = data[index]
        for (first, last), (start, end) in zip(item["spans"], spans[index]):
            assert item["tokens"][first : last + 1].tolist() == [i % 20 + 4 for i in range(start, end + 1)]


def test_spans_that_no_window_holds_are_counted():
    """Windows 0-10, 10-20, 20-23 do not overlap: spans across 10 or 20 and longer spans are in no window."""
    spans = ((8, 9), (9, 10), (10, 19), (19, 22), (20, 22), (0, 12))
    data = dataset((3,), (23,), (spans,), stride=10)
    assert len(data) == 3 and data.lost_spans() == 3
    assert sum(len(data.gold_spans(index)) for index in range(3)) == 3


def test_a_batch():
    """Gold tokens are marked, or the first token if there are none; padding is on the right."""
    data = dataset()
    batch = data.collater([data[index] for index in (3, 0, 1)])
    tokens = batch["net_input"]["src_tokens"]
    lengths = batch["net_input"]["src_lengths"]
    assert torch.equal(tokens.ne(1).sum(1), lengths) and batch["ntokens"] == int(lengths.sum())
    assert all((row[length:] == 1).all() for row, length in zip(tokens, lengths))
    assert batch["starts"].nonzero().tolist() == [[0, 0], [1, 5 + 4], [2, 5 + 9 - 7]]
    assert batch["ends"].nonzero().tolist() == [[0, 0], [1, 5 + 5], [2, 5 + 12 - 7]]
    assert batch["document"].sum(1).tolist() == [5, 10, 10]
    assert not batch["document"][tokens.eq(1)].any() and not batch["document"][:, 0].any()
    assert batch["question"].tolist() == [1, 0, 0] and batch["gold"][1] == ["answer 0"]
    assert data.collater([]) == {}


def test_several_spans_of_one_window():
    data = dataset((3,), (10,), (((1, 2), (1, 4), (6, 6)),))
    batch = data.collater([data[0]])
    assert batch["starts"][0].nonzero()[:, 0].tolist() == [6, 11]
    assert batch["ends"][0].nonzero()[:, 0].tolist() == [7, 9, 11]
