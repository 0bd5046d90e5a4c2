"""fairseq's cross-entropy with the entropy regulariser of the DAFT paper."""

import math
from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from torch import Tensor, nn

from common.attention import position_entropy

from ..loading.known_options import option_field


@dataclass
class SparseCrossEntropyConfig(CrossEntropyCriterionConfig):
    """Options of ``cross_entropy`` and the regulariser's factor."""

    entropy_weight: float = option_field(0.001, "factor of the entropy of the position biases (the paper: 0.001)")


@register_criterion("sparse_cross_entropy", dataclass=SparseCrossEntropyConfig)
class SparseCrossEntropyCriterion(CrossEntropyCriterion):
    """Cross-entropy and, in training, ``entropy_weight`` · Σ_heads entropy(softmax(w)) (DAFT, Eq. 10).

    For models with DAFT-conv. The logged loss and perplexity are those of the cross-entropy alone; the sum over all
    heads and layers, in nats, is logged as ``position_entropy``.

    Raises:
        ValueError: the factor is below 0 or not finite, or the model has no DAFT-conv.
    """

    def __init__(self, task, sentence_avg: bool, entropy_weight: float) -> None:
        super().__init__(task, sentence_avg)
        if not 0.0 <= entropy_weight < math.inf:
            raise ValueError(f"--entropy-weight is {entropy_weight}; allowed: at least 0 and finite")
        self.entropy_weight = entropy_weight

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The sum of the loss over ``sample``, the sample size and the logging output, as fairseq's criterion returns.

        With ``reduce`` False, the first is the loss of each token with its share of the regulariser.
        """
        loss, sample_size, logging_output = super().forward(model, sample, reduce)
        entropy = position_entropy(model)
        if model.training:
            # The trainer divides by the sample size.
            loss = loss + self.entropy_weight * sample_size / loss.numel() * entropy.to(loss.dtype)
        logging_output["position_entropy"] = entropy.detach() * sample_size
        return loss, sample_size, logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the cross-entropy as fairseq does, and the mean entropy over workers."""
        CrossEntropyCriterion.reduce_metrics(logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        entropy = sum(log.get("position_entropy", 0) for log in logging_outputs)
        metrics.log_scalar("position_entropy", entropy / sample_size, sample_size, round=3)
