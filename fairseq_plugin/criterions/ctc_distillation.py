"""``--criterion ctc_distillation``: CTC, and the distribution that a teacher gives to each frame of a recording."""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.ctc import CtcCriterion, CtcCriterionConfig
from fairseq.models.wav2vec.wav2vec2_asr import Wav2VecCtc
from fairseq.tasks import FairseqTask
from fairseq.tasks.audio_finetuning import AudioFinetuningTask
from torch import Tensor, nn

from ..distill.teacher import Teacher, bare, check_of_pair
from .distillation import DistillationConfig, check_distillation, divergences, log_divergence, logged_divergence


@dataclass
class CtcDistillationConfig(CtcCriterionConfig, DistillationConfig):
    """Options of ``ctc_distillation``: those of ``ctc`` and of ``distillation``."""


@register_criterion("ctc_distillation", dataclass=CtcDistillationConfig)
class CtcDistillationCriterion(CtcCriterion):
    """(1 - w) · CTC + w · T² · the sum over real frames of KL(teacher || student), with the KL at temperature T.

    For ``wav2vec_ctc``, with a fine-tuned ``wav2vec_ctc`` as the teacher. The teacher reads whole recordings, also
    where masks hide a part from the student. The logged ``loss`` is CTC, as for fairseq's ``ctc``; in training,
    ``teacher_kl``, bits per frame, is logged too. In evaluation this is fairseq's criterion, and the teacher is not
    loaded.

    Raises:
        ValueError: the task is not audio_finetuning, the model is not ``wav2vec_ctc``, or the temperature or the weight
            is out of range; there is no teacher, or it has other frames or letters, or another --normalize.
    """

    def __init__(self, cfg: CtcDistillationConfig, task: FairseqTask) -> None:
        if not isinstance(task, AudioFinetuningTask):
            raise ValueError(f"--task is a {type(task).__name__}; allowed with ctc_distillation: audio_finetuning")
        super().__init__(cfg, task)
        check_distillation(cfg.distillation_temperature, cfg.distillation_weight)
        self.temperature, self.weight = cfg.distillation_temperature, cfg.distillation_weight
        self.teacher = Teacher(cfg.teacher, task, cfg.ddp_backend)

    def train(self, mode: bool = True) -> "CtcDistillationCriterion":
        """torch's; fairseq calls it before an update, so an unreadable teacher raises its error before the update."""
        if mode:
            teacher = self.teacher.read()
            _check_model(f"--teacher {self.teacher.path!r}", teacher)
            if self.task.cfg.normalize != teacher.cfg.normalize:
                raise ValueError(
                    f"--normalize is {self.task.cfg.normalize}; allowed with --teacher {self.teacher.path!r}, as it "
                    f"was trained: {teacher.cfg.normalize}"
                )
        return super().train(mode)

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True, **options: Any
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """The sum of the loss over the recordings of ``sample``, the sample size and the logging output, as ``ctc``."""
        with check_of_pair():
            _check_model("--arch", bare(model))
        if not model.training:
            return super().forward(model, sample, reduce, **options)
        outputs = []
        hook = model.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        try:
            loss, sample_size, logging_output = super().forward(model, sample, reduce, **options)
        finally:
            hook.remove()
        divergence = self._divergence(model, sample, outputs[0])
        total = (1.0 - self.weight) * loss + self.weight * self.temperature**2 * divergence.sum()
        return total, sample_size, {**logging_output, **logged_divergence(divergence)}

    def _divergence(self, model: nn.Module, sample: dict[str, Any], output: dict[str, Any]) -> Tensor:
        """The KL divergence of each real frame, of the student's ``output`` on ``sample``, from the teacher's."""
        teacher = self.teacher.model_like(bare(model))
        with torch.no_grad():
            teacher_output = teacher(**sample["net_input"])
            teacher_log_probs = teacher.get_normalized_probs(teacher_output, log_probs=True)  # (T, B, V)
        logits = output["encoder_out"]  # (T, B, V); fairseq has added a weight of blanks, if there is one
        with check_of_pair():
            if logits.shape != teacher_log_probs.shape:
                (frames, _, letters), (teacher_frames, _, teacher_letters) = logits.shape, teacher_log_probs.shape
                raise ValueError(
                    f"--teacher {self.teacher.path!r} gives {teacher_frames} frames of {teacher_letters} letters; "
                    f"allowed: {frames} of {letters}, as the model"
                )
        mask = output["padding_mask"]
        real = torch.ones_like(logits[..., 0], dtype=torch.bool) if mask is None else ~mask.T  # (T, B)
        return divergences(logits[real].float(), teacher_log_probs[real], self.temperature)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log what fairseq's ``ctc`` logs and, in training, the teacher's term."""
        CtcCriterion.reduce_metrics(logging_outputs)
        log_divergence(logging_outputs)


def _check_model(what: str, model: nn.Module) -> None:
    if not isinstance(model, Wav2VecCtc):
        raise ValueError(f"{what} is a {type(model).__name__}; allowed with ctc_distillation: wav2vec_ctc")
