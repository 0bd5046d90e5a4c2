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

#: The meter of what was answered, which is not shown; a row is question, score, exact match and F1 of a window.
_ANSWERED = "_answered"
#: What is shown of it, and the column.
_MEASURES = {"em": 2, "f1": 3}


@register_criterion("span_extraction")
class SpanExtractionCriterion(FairseqCriterion):
    """Minus the logarithm of the probability of the gold starts, and of the gold ends, the mean of both.

    Start and end have a softmax each over the document's tokens of a window and its first token, which is the gold one
    of a window without any gold span. The probabilities of several gold starts are added, and those of ends (Clark and
    Gardner, ACL 2018, equation 2, for starts and ends apart).

    Outside of training, ``em`` and ``f1`` are logged, in per cent of the questions seen. A question is answered by the
    best span of all of its windows, by its score over that of no answer in the same window.

    Raises:
        ValueError: another task than ``span_extraction``.
    """

    def __init__(self, task) -> None:
        super().__init__(task)
        if not hasattr(task, "answer_spans"):
            name = getattr(task.cfg, "_name", None) or type(task).__name__
            raise ValueError(f"--task is {name}; allowed with --criterion span_extraction: span_extraction")

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The loss summed over the windows of ``sample``, how many there are, and what is logged.

        With ``reduce`` False the loss of each window (B,). ``sample`` is a batch of ``SpanWindowDataset``.
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
        """Log the mean loss of a window in bits, and what is known of the questions."""
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / sample_size / math.log(2), sample_size, round=3)
        answered = [log[_ANSWERED] for log in logging_outputs if _ANSWERED in log]
        if answered:
            metrics.log_concat_tensor(_ANSWERED, torch.cat(answered))
            for name, column in _MEASURES.items():
                metrics.log_derived(name, lambda meters, column=column: _of_questions(meters, column))

    def logging_outputs_can_be_summed(self) -> bool:
        """fairseq's hook, with several workers: in training alone. Which window is best is known when all are there.

        Raises:
            ValueError: validation on CPUs; fairseq gathers what cannot be summed on GPUs alone.
        """
        if not self.training and not torch.cuda.is_available():
            raise ValueError(
                "validation runs on several workers without a GPU; allowed with --criterion span_extraction: GPUs, one "
                "worker, or --disable-validation and fairseq-validate afterwards"
            )
        return self.training


def span_loss(scores: Tensor, document: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The loss of each window (B,), float32 at least, from ``scores`` (B, T, 2); see ``SpanExtractionCriterion``.

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
    """The mean of a column over the questions, each by its best window, in per cent."""
    rows = meters[_ANSWERED].tensor.numpy()
    best = best_of_each(rows[:, 0], rows[:, 1])
    return round(100.0 * float(np.mean(rows[best, column])), 2)
