"""The check of the criterion for classification tasks."""

from typing import Any

from fairseq.criterions import FairseqCriterion
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion


def check_classification(criterion: FairseqCriterion, cfg: Any, task: str, head: str) -> None:
    """Refuse a criterion that does not fit the labels of ``task``, whose model has the head ``head``.

    Raises:
        ValueError: it is not ``sentence_prediction``, names another head, or is for regression.
    """
    if not isinstance(criterion, SentencePredictionCriterion):
        name = getattr(cfg, "_name", None) or getattr(cfg, "criterion", None)
        raise ValueError(f"--criterion is {name}; allowed with --task {task}: sentence_prediction")
    if criterion.regression_target:
        raise ValueError(
            f"--regression-target is given; allowed with --task {task}: not given, since labels are classes"
        )
    if criterion.classification_head_name != head:
        raise ValueError(
            f"classification_head_name is {criterion.classification_head_name} for the criterion; allowed: {head}, the "
            "task's"
        )
