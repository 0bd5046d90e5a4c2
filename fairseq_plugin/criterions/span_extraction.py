"""``--criterion span_extraction``: the loss of an answer's start and end, and exact match and F1 of whole questions."""

import math
from typing import Any

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from torch import Tensor, nn

from ..data.span_answers import best_of_each, exact_match, f1_score

#: The hidden meter of answers; a row is the question, score, exact match and F1 of a window.
_ANSWERED = "_answered"
#: The displayed measures, with their columns.
_MEASURES = {"em": 2, "f1": 3}


@register_criterion("span_extraction")
class SpanExtractionCriterion(FairseqCriterion):
    """The mean of the negative log-probabilities of the gold starts and of the gold ends.

    Start and end each have a softmax over the document tokens of a window and its first token, which is the gold token
    of a window without gold spans. Probabilities of several gold starts are added, and likewise of ends (Clark and
    Gardner, ACL 2018, equation 2, for starts and ends separately).

    Outside of training, ``em`` and ``f1`` are logged, in per cent of the questions seen. The answer to a question is
    the best span of all its windows, by its score minus that of no answer in the same window.

    Raises:
        ValueError: the task is not ``span_extraction``.
    """

    def __init__(self, task) -> None:
        super().__init__(task)
        if not hasattr(task, "answer_spans"):
            name = getattr(task.cfg, "_name", None) or type(task).__name__
            raise ValueError(f"--task is {name}; allowed with --criterion span_extraction: span_extraction")

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The sum of the loss over the windows of ``sample``, their number, and the logging output.

        With ``reduce`` False, the first is the loss of each window (B,). ``sample`` is from ``SpanWindowDataset``.
        """
        scores = self.task.span_scores(model, sample)  # (B, T, 2)
        losses = span_loss(scores, sample["document"], sample["starts"], sample["ends"])
        logging_output: dict[str, Any] = {
            "loss": losses.sum().detach(),
            "sample_size": len(losses),
            "nsentences": sample["nsentences"],
            "ntokens": sample["ntokens"],
        }
        if not model.training:
            logging_output[_ANSWERED] = self._answered(scores, sample)
        return losses.sum() if reduce else losses, len(losses), logging_output

    def _answered(self, scores: Tensor, sample: dict[str, Any]) -> Tensor:
        """Question, score, exact match and F1 of each window (B, 4), float64 on the CPU."""
        answers, best = self.task.answer_spans(scores, sample)
        measured = [[exact_match(text, gold), f1_score(text, gold)] for text, gold in zip(answers, sample["gold"])]
        columns = torch.stack([sample["question"].cpu().double(), best.cpu().double()], 1)
        return torch.cat([columns, torch.tensor(measured, dtype=torch.float64)], 1)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss of a window in bits, and the measures of the questions."""
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / sample_size / math.log(2), sample_size, round=3)
        answered = [log[_ANSWERED] for log in logging_outputs if _ANSWERED in log]
        if answered:
            metrics.log_concat_tensor(_ANSWERED, torch.cat(answered))
            for name, column in _MEASURES.items():
                metrics.log_derived(name, lambda meters, column=column: _of_questions(meters, column))

    def logging_outputs_can_be_summed(self) -> bool:
        """fairseq's hook: only in training, since choosing the best window needs the windows of all workers.

        Raises:
            ValueError: validation on several CPU workers, since fairseq can gather such outputs only on GPUs.
        """
        if not self.training and not torch.cuda.is_available():
            raise ValueError(
                "validation runs on several workers without a GPU; allowed with --criterion span_extraction: GPUs, one "
                "worker, or --disable-validation and fairseq-validate afterwards"
            )
        return self.training


def span_loss(scores: Tensor, document: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The loss of each window (B,), at least float32, from ``scores`` (B, T, 2); see ``SpanExtractionCriterion``.

    ``document``, ``starts`` and ``ends`` are (B, T), bool, as in a batch of ``SpanWindowDataset``.
    """
    scores = scores if scores.dtype == torch.float64 else scores.float()
    allowed = document.clone()
    allowed[:, 0] = True
    total = scores.new_zeros(len(scores))
    for side, gold in zip(scores.unbind(2), (starts, ends)):
        side = side.masked_fill(~allowed, -torch.inf)
        total = total + side.logsumexp(1) - side.masked_fill(~gold, -torch.inf).logsumexp(1)
    return total / 2.0


def _of_questions(meters: MetersDict, column: int) -> float:
    """The mean of a column over the questions, from the best window of each, in per cent."""
    rows = meters[_ANSWERED].tensor.numpy()
    best = best_of_each(rows[:, 0], rows[:, 1])
    return round(100.0 * float(np.mean(rows[best, column])), 2)
