"""The head that scores where an answer begins and ends, and the best span of its scores."""

from typing import NamedTuple

import torch
from fairseq.models.roberta.model import RobertaClassificationHead
from torch import Tensor
from torch.nn import functional as F


class SpanHead(RobertaClassificationHead):
    """RoBERTa's classification head at every token: features (B, T, C) -> scores of start and of end (B, T, 2)."""

    def forward(self, features: Tensor, **unused) -> Tensor:
        batch, tokens, channels = features.shape
        # fairseq's head uses the first of several tokens.
        return super().forward(features.reshape(batch * tokens, 1, channels)).view(batch, tokens, 2)


class BestSpans(NamedTuple):
    """The best span of each of B windows: its first and last token, and its score minus that of no answer, all (B,)."""

    first: Tensor
    last: Tensor
    score: Tensor


def best_spans(scores: Tensor, document: Tensor, max_answer_length: int) -> BestSpans:
    """The spans of at most ``max_answer_length`` tokens whose start and end have the largest sum of scores.

    Args:
        scores: (B, T, 2), of start and end.
        document: (B, T), bool, True where an answer may be: one contiguous range in each row, not empty.

    Returns:
        Scores are relative to the first token, which represents no answer. This makes windows comparable: a softmax
        over a window determines scores only up to a constant, which cancels. O(B T max_answer_length).
    """
    starts, ends = scores.float().unbind(2)  # (B, T) each
    no_answer = starts[:, 0] + ends[:, 0]
    starts, ends = (side.masked_fill(~document, -torch.inf) for side in (starts, ends))
    # For each token, the best end among itself and the next max_answer_length - 1 tokens.
    padded = F.pad(ends, (0, max_answer_length - 1), value=-torch.inf)
    best, last = F.max_pool1d(padded[:, None], max_answer_length, stride=1, return_indices=True)
    score, first = (starts + best[:, 0]).max(1)
    return BestSpans(first, last[:, 0].gather(1, first[:, None])[:, 0], score - no_answer)
