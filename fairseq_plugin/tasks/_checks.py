"""Checks of what a task is combined with: options, model and criterion."""

from collections.abc import Mapping
from typing import Any

from fairseq.criterions import FairseqCriterion
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.utils import safe_getattr

from ..loading.known_options import flag_of


def name_of(cfg: Any, kind: str) -> str | None:
    """The name in the options ``cfg`` of an "arch" or a "criterion", from either of fairseq's configuration systems."""
    return getattr(cfg, "_name", None) or getattr(cfg, kind, None)


def check_required(args: Any, required: Mapping[str, Any], task: str, why: str = "") -> None:
    """Raise ValueError unless the options that ``required`` names have these values, are missing or are None."""
    for name, allowed in required.items():
        value = safe_getattr(args, name, allowed)
        value = getattr(value, "value", value)
        if value is not None and value != allowed:
            raise ValueError(f"{flag_of(name)} is {value}; allowed with --task {task}: {allowed}{why}")


def check_architecture(cfg: Any, base: type, task: str) -> type:
    """The class of the model that ``cfg`` names; ValueError unless it is a ``base``, a model of ``task``."""
    name = name_of(cfg, "arch")
    model = ARCH_MODEL_REGISTRY.get(name, object)
    if not issubclass(model, base):
        allowed = sorted(arch for arch, registered in ARCH_MODEL_REGISTRY.items() if issubclass(registered, base))
        raise ValueError(f"--arch is {name}; allowed with --task {task}: {', '.join(allowed)}")
    return model


def check_classification(criterion: FairseqCriterion, cfg: Any, task: str, head: str) -> None:
    """Refuse a criterion that does not fit the labels of ``task``, whose model has the head ``head``.

    Raises:
        ValueError: it is not ``sentence_prediction``, names another head, or is for regression.
    """
    if not isinstance(criterion, SentencePredictionCriterion):
        raise ValueError(f"--criterion is {name_of(cfg, 'criterion')}; allowed with --task {task}: sentence_prediction")
    if criterion.regression_target:
        raise ValueError(
            f"--regression-target is given; allowed with --task {task}: not given, since labels are classes"
        )
    if criterion.classification_head_name != head:
        raise ValueError(
            f"classification_head_name is {criterion.classification_head_name} for the criterion; allowed: {head}, the "
            "task's"
        )
