"""Windows over documents, as a fairseq dataset: ``<s> question </s> piece of a document </s>``."""

from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils

from .sized_dataset import SizedDataset
from .span_folder import SpanSplit

#: <s> at the beginning, </s> after the question, and </s> at the end.
SPECIAL_TOKENS = 3


class Layout(NamedTuple):
    """How windows are cut, in tokens."""

    max_positions: int  # of a whole window
    max_question_length: int  # of a question; longer ones are cut at the end
    stride: int  # from the beginning of a window in its document to the beginning of the next

    def rooms(self, questions: np.ndarray) -> np.ndarray:
        """The number of document tokens that fit in a window with questions of lengths ``questions`` (N,)."""
        return self.max_positions - SPECIAL_TOKENS - np.minimum(questions, self.max_question_length)


class Windows(NamedTuple):
    """N windows: the pair of each, and its beginning and end in its document, all (N,)."""

    pair: np.ndarray
    begin: np.ndarray
    end: np.ndarray  # not included


def lay_windows(documents: np.ndarray, rooms: np.ndarray, stride: int) -> Windows:
    """Windows over P documents of lengths ``documents`` (P,), with room for ``rooms`` (P,) document tokens.

    Each begins ``stride`` tokens after the previous one. The last one ends with the document and may be shorter. Every
    token is in at least one window if ``stride`` is at most the room. O(N) in the number of windows.
    """
    counts = 1 + np.maximum(0, -(-(documents - rooms) // stride))
    pair = np.repeat(np.arange(len(documents)), counts)
    number = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = number * stride
    return Windows(pair, begin, np.minimum(begin + rooms[pair], documents[pair]))


class SpanWindowDataset(SizedDataset):
    """The windows of a split's questions, each with the gold spans that it contains completely.

    A batch of B windows, the longest of T tokens, has

    * ``net_input``: ``src_tokens`` (B, T), padded on the right, and ``src_lengths`` (B,);
    * ``document`` (B, T), bool, True where an answer may be, and ``starts`` and ``ends`` (B, T), bool, True at the
    first and the last tokens of gold spans; a window without gold spans has both at its first token, ``<s>``;
    * ``question`` (B,), the numbers of the questions, and ``gold``, their gold answers as texts.

    Every epoch has new batches.
    """

    def __init__(self, split: SpanSplit, layout: Layout, dictionary: Dictionary) -> None:
        self.split, self.layout, self.dictionary = split, layout, dictionary
        questions = np.minimum(split.question_tokens.sizes, layout.max_question_length)[split.pairs[:, 0]]
        documents = split.document_tokens.sizes[split.pairs[:, 1]].astype(np.int64)
        self.windows = lay_windows(documents, layout.rooms(questions), layout.stride)
        pair, begin, end = self.windows
        self.sizes = SPECIAL_TOKENS + questions[pair] + end - begin

    def gold_spans(self, index: int) -> np.ndarray:
        """The first and last document tokens (S, 2) of the gold spans that a window contains completely."""
        pair, begin, end = (field[index] for field in self.windows)
        spans = self.split.spans[self.split.ends[pair] : self.split.ends[pair + 1]].astype(np.int64)
        return spans[(spans[:, 0] >= begin) & (spans[:, 1] < end)]

    def lost_spans(self) -> int:
        """The number of gold spans that no window contains completely; O(S log N) for S spans and N windows."""
        counts = np.diff(self.split.ends)
        pair = np.repeat(np.arange(len(counts)), counts)
        first, last = self.split.spans.astype(np.int64).T
        # Of the windows that begin at or before a span, the last one extends farthest.
        pair_distance = int(self.split.document_tokens.sizes.max()) + 1
        window_keys = self.windows.pair * pair_distance + self.windows.begin
        window = np.searchsorted(window_keys, pair * pair_distance + first, side="right") - 1
        return int((last >= self.windows.end[window]).sum())

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair, begin, end = (int(field[index]) for field in self.windows)
        question, document = (int(number) for number in self.split.pairs[pair])
        subwords = self.split.question_tokens[question][: self.layout.max_question_length]
        piece = self.split.document_tokens[document][begin:end]
        bos, eos = (torch.tensor([token]) for token in (self.dictionary.bos(), self.dictionary.eos()))
        first = len(subwords) + 2
        return {
            "id": int(index),
            "tokens": torch.cat([bos, subwords.long(), eos, piece.long(), eos]),
            "piece": (first, first + len(piece)),
            "spans": torch.from_numpy(self.gold_spans(index) - begin + first),
            "question": question,
        }

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """fairseq's hook: a batch of ``samples``."""
        if not samples:
            return {}
        tokens = data_utils.collate_tokens([sample["tokens"] for sample in samples], self.dictionary.pad())
        document, starts, ends = (torch.zeros(tokens.shape, dtype=torch.bool) for _ in range(3))
        for row, sample in enumerate(samples):
            document[row, slice(*sample["piece"])] = True
            first, last = sample["spans"].T if len(sample["spans"]) else (0, 0)
            starts[row, first] = ends[row, last] = True
        lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
        questions = [sample["question"] for sample in samples]
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": {"src_tokens": tokens, "src_lengths": lengths},
            "document": document,
            "starts": starts,
            "ends": ends,
            "question": torch.tensor(questions),
            "gold": [self.split.questions[question].answers for question in questions],
        }
