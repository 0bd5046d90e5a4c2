"""``--criterion distillation``: a teacher's distribution and the data's own targets (Hinton et al., 2015)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from fairseq.tasks.audio_pretraining import AudioPretrainingTask
from fairseq.tasks.hubert_pretraining import HubertPretrainingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import II
from torch import Tensor, nn
from torch.nn import functional as F

from ..distill.teacher import TeacherConfig, TeacherCriterion, bare, check_of_pair
from ..loading.known_options import option_field

#: Entries of a logging output: whether it is for masked tokens, the sum of divergences, and the number of tokens.
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
class DistillationCriterion(TeacherCriterion):
    """(1 - w) · cross-entropy + w · T² · KL(teacher || student) over real targets, with the KL at temperature T.

    For language models, encoder-decoders, and masked models, where only masked tokens count. Only the student gets
    gradients. The logged ``loss`` and ``ppl`` are the cross-entropy, as for fairseq's ``cross_entropy`` or
    ``masked_lm``; in training, ``teacher_kl`` is logged too, in bits, at temperature T. In evaluation this is fairseq's
    criterion, and the teacher is not loaded.

    Raises:
        ValueError: there is no teacher, or it has another vocabulary or task; the temperature is not above 0, or the
            weight not in 0 to 1; a softmax is adaptive, which gives no logits for the whole vocabulary.
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
        if isinstance(task, AudioPretrainingTask | HubertPretrainingTask):
            raise ValueError(
                "--criterion is distillation; allowed for models of audio: attention_transfer, or ctc_distillation "
                "with --task audio_finetuning, since they have no logits of words"
            )
        super().__init__(task, teacher, ddp_backend)
        check_distillation(distillation_temperature, distillation_weight)
        self.temperature, self.weight = distillation_temperature, distillation_weight
        self.masked, self.sentence_avg = isinstance(task, MaskedLMTask), sentence_avg
        criterion = (
            MaskedLmLoss(MaskedLmConfig(tpu=False), task) if self.masked else CrossEntropyCriterion(task, sentence_avg)
        )
        self.own_criterion: FairseqCriterion = criterion

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict]:
        """The sum of the loss over the targets of ``sample``, the sample size and the logging output, as in fairseq.

        With ``reduce`` False, the first is the loss of each target.
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
            teacher = self.teacher.model_like(bare(model))
            with check_of_pair():
                _check_softmax(teacher)
            teacher_logits = self._logits(teacher, sample, real)
        losses = F.cross_entropy(logits, target, reduction="none")
        divergence = divergences(logits, teacher_logits, self.temperature)
        total = (1.0 - self.weight) * losses + self.weight * self.temperature**2 * divergence
        logging_output = {
            "loss": losses.sum().detach(),
            "ntokens": sample["ntokens"],
            "nsentences": len(sample["target"]),
            "sample_size": self._sample_size(sample, target),
            _MASKED: int(self.masked),
            **logged_divergence(divergence),
        }
        return total.sum() if reduce else total, logging_output["sample_size"], logging_output

    def _logits(self, model: nn.Module, sample: dict[str, Any], real: Tensor) -> Tensor:
        """The logits (N, V) of the N ``real`` targets, at least float32."""
        if self.masked:
            logits = model(**sample["net_input"], masked_tokens=real)[0]
        else:
            logits = model(**sample["net_input"])[0][real]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _sample_size(self, sample: dict[str, Any], target: Tensor) -> int:
        """The number of targets or, with ``sentence_avg``, of sentences, by which fairseq divides the loss."""
        if self.masked:
            return len(target)
        return len(sample["target"]) if self.sentence_avg else sample["ntokens"]

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the cross-entropy as fairseq does and, in training, the teacher's term."""
        masked = any(log.get(_MASKED, 0) for log in logging_outputs)
        (MaskedLmLoss if masked else CrossEntropyCriterion).reduce_metrics(logging_outputs)
        log_divergence(logging_outputs)


def check_distillation(temperature: float, weight: float) -> None:
    """Raise ValueError unless ``temperature`` is above 0 and finite, and ``weight`` in 0 to 1."""
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"--distillation-temperature is {temperature}; allowed: above 0 and finite")
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"--distillation-weight is {weight}; allowed: 0 to 1")


def divergences(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """The KL divergence (N,) of the student's distributions from the teacher's, from logits (N, V) of both."""
    student_log_probs, teacher_log_probs = ((x / temperature).log_softmax(1) for x in (logits, teacher_logits))
    return F.kl_div(student_log_probs, teacher_log_probs, reduction="none", log_target=True).sum(1)


def logged_divergence(divergence: Tensor) -> dict[str, Any]:
    """Entries of a logging output for the ``divergences`` (N,) of a batch."""
    return {_DIVERGENCE: divergence.sum().detach(), _TOKENS: len(divergence)}


def log_divergence(logging_outputs: list[dict[str, Any]]) -> None:
    """Log ``teacher_kl``, the mean divergence in bits, if there is one, as in training."""
    tokens = sum(log.get(_TOKENS, 0) for log in logging_outputs)
    if tokens > 0:
        divergence = sum(log.get(_DIVERGENCE, 0) for log in logging_outputs)
        metrics.log_scalar("teacher_kl", divergence / tokens / math.log(2), tokens, round=3)


def _check_softmax(model: nn.Module) -> None:
    if getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None:
        raise ValueError(
            "--adaptive-softmax-cutoff is given, for the model or for its teacher; allowed with --criterion "
            "distillation: not given, since an adaptive softmax has no logits of the whole vocabulary"
        )
