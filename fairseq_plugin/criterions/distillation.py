"""``--criterion distillation``: a teacher's distribution beside the data's own targets (Hinton et al., 2015)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import II
from torch import Tensor, nn
from torch.nn import functional as F

from ..distill.teacher import Teacher, TeacherConfig, bare, check_of_pair
from ..loading.known_options import option_field

#: Entries of a logging output: whether it is of masked tokens, the sum of divergences, and over how many tokens.
_MASKED, _DIVERGENCE, _TOKENS = "of_masked_tokens", "teacher_kl_sum", "teacher_kl_tokens"


@dataclass
class DistillationConfig(TeacherConfig):
    """Options of ``distillation``."""

    distillation_temperature: float = option_field(
        2.0, "what the logits of both models are divided by for the teacher's term"
    )
    distillation_weight: float = option_field(0.5, "weight of the teacher's term; that of cross-entropy is 1 less it")
    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("distillation", dataclass=DistillationConfig)
class DistillationCriterion(FairseqCriterion):
    """(1 - w) · cross-entropy + w · T² · KL(teacher || student), both distributions at temperature T; real targets.

    For language models, encoder-decoders, and masked models, of which masked tokens alone count. Gradients of the
    student alone. What is logged as ``loss`` and ``ppl`` is the cross-entropy, as fairseq's ``cross_entropy`` or
    ``masked_lm`` has it, and ``teacher_kl`` beside it in training, in bits, at temperature T. In evaluation it is
    fairseq's criterion, and the teacher is not read.

    Raises:
        ValueError: no teacher, or one for another vocabulary or task; a temperature that is not above 0, a weight
            outside of 0 to 1; an adaptive softmax, which gives no logits of the whole vocabulary.
    """

    def __init__(
        self,
        task: FairseqTask,
        teacher: str | None,
        distillation_temperature: float,
        distillation_weight: float,
        sentence_avg: bool,
        ddp_backend: str,
    ) -> None:
        super().__init__(task)
        self.teacher = Teacher(teacher, task, ddp_backend)
        if not 0.0 < distillation_temperature < math.inf:
            raise ValueError(f"--distillation-temperature is {distillation_temperature}; allowed: above 0 and finite")
        if not 0.0 <= distillation_weight <= 1.0:
            raise ValueError(f"--distillation-weight is {distillation_weight}; allowed: 0 to 1")
        self.temperature, self.weight = distillation_temperature, distillation_weight
        self.masked, self.sentence_avg = isinstance(task, MaskedLMTask), sentence_avg
        own = (
            MaskedLmLoss(MaskedLmConfig(tpu=False), task) if self.masked else CrossEntropyCriterion(task, sentence_avg)
        )
        self.own_criterion: FairseqCriterion = own

    def train(self, mode: bool = True) -> "DistillationCriterion":
        """torch's, and fairseq's sign that an update follows: a teacher that cannot be read is said before it."""
        if mode:
            self.teacher.read()
        return super().train(mode)

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict]:
        """The loss summed over the targets of ``sample``, its size and the log, as fairseq's criteria return them.

        With ``reduce`` False the loss of each target.
        """
        with check_of_pair():
            _check_softmax(bare(model))
        if not model.training:
            loss, sample_size, logging_output = self.own_criterion(model, sample, reduce)
            return loss, sample_size, {**logging_output, _MASKED: int(self.masked)}
        real = sample["target"].ne(self.padding_idx)  # (B, T)
        target = sample["target"][real]  # (N,)
        logits = self._logits(model, sample, real)  # (N, V)
        with torch.no_grad():
            teacher = self.teacher.beside(bare(model))
            with check_of_pair():
                _check_softmax(teacher)
            wanted = self._logits(teacher, sample, real)
        losses = F.cross_entropy(logits, target, reduction="none")
        divergence = self._divergence(logits, wanted)
        total = (1.0 - self.weight) * losses + self.weight * self.temperature**2 * divergence
        logging_output = {
            "loss": losses.sum().detach(),
            "ntokens": sample["ntokens"],
            "nsentences": len(sample["target"]),
            "sample_size": self._sample_size(sample, target),
            _MASKED: int(self.masked),
            _DIVERGENCE: divergence.sum().detach(),
            _TOKENS: len(target),
        }
        return total.sum() if reduce else total, logging_output["sample_size"], logging_output

    def _logits(self, model: nn.Module, sample: dict[str, Any], real: Tensor) -> Tensor:
        """Logits of the N ``real`` targets (N, V), float32 at least."""
        if self.masked:
            logits = model(**sample["net_input"], masked_tokens=real)[0]
        else:
            logits = model(**sample["net_input"])[0][real]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _divergence(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """KL divergence of the student's distribution from the teacher's at each target, (N,)."""
        own, teachers = ((x / self.temperature).log_softmax(1) for x in (logits, wanted))
        return F.kl_div(own, teachers, reduction="none", log_target=True).sum(1)

    def _sample_size(self, sample: dict[str, Any], target: Tensor) -> int:
        """Number by which fairseq's criterion divides the loss: of targets or, with ``sentence_avg``, of sentences."""
        if self.masked:
            return len(target)
        return len(sample["target"]) if self.sentence_avg else sample["ntokens"]

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the cross-entropy as fairseq does, and in training the teacher's term."""
        masked = any(log.get(_MASKED, 0) for log in logging_outputs)
        (MaskedLmLoss if masked else CrossEntropyCriterion).reduce_metrics(logging_outputs)
        tokens = sum(log.get(_TOKENS, 0) for log in logging_outputs)
        if tokens > 0:
            divergence = sum(log.get(_DIVERGENCE, 0) for log in logging_outputs)
            metrics.log_scalar("teacher_kl", divergence / tokens / math.log(2), tokens, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """fairseq's hook: True."""
        return True


def _check_softmax(model: nn.Module) -> None:
    if getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None:
        raise ValueError(
            "--adaptive-softmax-cutoff is given, for the model or for its teacher; allowed with --criterion "
            "distillation: not given, since an adaptive softmax has no logits of the whole vocabulary"
        )
