"""Losses for training an attention to imitate softmax attention, and a check of which mechanisms can use them.

Both hosts use them: fairseq's ``--criterion attention_transfer`` and ``timm_plugin.transfer``.

Legend: B batch, H heads, n queries, m keys, e channels of a head's value.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import ATTENTIONS, InnerAttention

#: Factor of squared errors, as in LoLCATs' code.
SCALE = 1000.0
#: Weights are clamped to this minimum before the logarithm, since relu features may give 0.
_LEAST_WEIGHT = 1e-6


def squared_error(student: Tensor, teacher: Tensor) -> Tensor:
    """1000 times the mean squared error of each query's output, over heads and channels, (B, n).

    ``student`` and ``teacher`` are outputs (B, H, n, e) of the heads, before the output projection (Zhang et al.,
    *LoLCATs*, ICLR 2025, section 3.2, in the form of the authors' code). Computed in at least float32.
    """
    student, teacher = _at_least_float32(student, teacher)
    return SCALE * (student - teacher).square().mean((1, 3))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL divergence of each query's weights from those of softmax attention, the mean over heads, (B, n).

    ``student`` and ``teacher`` are maps (B, H, n, m). It is the cross-entropy of Zhang et al., *The Hedgehog & the
    Porcupine*, ICLR 2024, minus the entropy of the softmax weights. That entropy depends on no parameter, so gradients
    are the paper's, and the loss of equal weights is 0. Weights below 1e-6 count as 1e-6. Computed in at least float32.
    """
    student, teacher = _at_least_float32(student, teacher)
    terms = torch.special.xlogy(teacher, teacher) - teacher * student.clamp(min=_LEAST_WEIGHT).log()
    return terms.sum(3).mean(1)


class ImitationLoss(NamedTuple):
    """A loss, and the name of the attention method whose results it compares."""

    of: Callable[[Tensor, Tensor], Tensor]  # (student, teacher) -> (B, n)
    method: str


#: The losses by their names on command lines.
IMITATION_LOSSES = {
    "outputs": ImitationLoss(squared_error, "forward"),
    "weights": ImitationLoss(divergence, "attention_matrix"),
}


def check_imitates(option: str, loss: str, attention: InnerAttention, place: str) -> None:
    """Raise ValueError unless ``attention``, at ``place`` in a model, can be trained with ``loss``, set by ``option``.

    "weights" needs weights as in softmax attention, at least 0 and with sum 1: ``InnerAttention.weighted_mean``.
    """
    if loss == "weights" and not attention.weighted_mean:
        names = ", ".join(name for name, kind in ATTENTIONS.items() if kind.weighted_mean)
        raise ValueError(
            f"{option} is weights and {place} is {attention.name} attention, which does not weigh all tokens by "
            f"weights of the sum 1 as softmax does; allowed with it: outputs. With weights: {names}, without forget, "
            "short_conv and rotary positions around it"
        )


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]
