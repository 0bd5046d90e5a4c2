"""A trained model from which another one learns: loaded once, for criteria with an option ``--teacher``."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu, prune_state_dict
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.constants import DDP_BACKEND_CHOICES
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqEncoderDecoderModel, FairseqLanguageModel, build_model
from fairseq.models.hubert.hubert import HubertModel
from fairseq.models.roberta import RobertaModel
from fairseq.models.wav2vec.wav2vec2 import Wav2Vec2Model
from fairseq.models.wav2vec.wav2vec2_asr import Wav2VecCtc
from fairseq.tasks import FairseqTask
from fairseq.tasks.audio_finetuning import AudioFinetuningTask
from fairseq.tasks.audio_pretraining import AudioPretrainingTask
from fairseq.tasks.hubert_pretraining import HubertPretrainingTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import II
from torch import nn

from common.checkpoints import check_state_dict
from common.ops.shared.checks import shortened

from ..loading.checkpoint_config import EMBEDDING_FILES
from ..loading.checkpoints import UNWRAPPED, hint, read_training
from ..loading.configuration_errors import configuration_errors
from ..loading.known_options import option_field


@dataclass
class TeacherConfig(FairseqDataclass):
    """Options of criteria with a teacher."""

    teacher: Optional[str] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None, "checkpoint of the trained model to learn from"
    )
    ddp_backend: DDP_BACKEND_CHOICES = II("distributed_training.ddp_backend")


class Teacher:
    """The model of the checkpoint ``path`` as a teacher for ``task``, loaded when it is first needed.

    Deliberately not an ``nn.Module``: otherwise fairseq would save, cast and train it with the criterion and pass it to
    data parallelism.

    Raises:
        ValueError: ``path`` is None, the task reads texts in parts, or parameters are sharded.
    """

    def __init__(self, path: str | None, task: FairseqTask, ddp_backend: str) -> None:
        if path is None:
            raise ValueError("--teacher is not given; allowed: the checkpoint of a trained model")
        if ddp_backend == "fully_sharded":
            raise ValueError("--ddp-backend is fully_sharded; allowed with --teacher: legacy_ddp")
        if getattr(task, "reads_in_parts", False):
            raise ValueError(f"--task is {_name(task)}; allowed with --teacher: language_modeling")
        self.path, self.task = path, task
        self._model: nn.Module | None = None

    def check_file(self) -> None:
        """Raise ValueError unless the file exists."""
        if not Path(self.path).is_file():
            raise ValueError(
                f"--teacher is {self.path!r}, which is no file; allowed: the checkpoint of a trained model"
            )

    def read(self) -> nn.Module:
        """The model in evaluation mode, on its current device and in its current precision.

        Raises:
            ValueError: the file cannot be read, or its model is for another task or another dictionary.
        """
        if self._model is None:
            self.check_file()
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            with torch.random.fork_rng(devices):  # the model's initial weights are random; training is not affected
                self._model = _load(self.path, self.task)
            self._model.eval().requires_grad_(False)
        return self._model

    def model_like(self, student: nn.Module) -> nn.Module:
        """The model on the device and in the precision of ``student``."""
        like = next(student.parameters())
        return self.read().to(device=like.device, dtype=like.dtype)


class TeacherCriterion(FairseqCriterion):
    """A criterion with a teacher, which is read before the first update."""

    def __init__(self, task: FairseqTask, teacher: str | None, ddp_backend: str) -> None:
        super().__init__(task)
        self.teacher = Teacher(teacher, task, ddp_backend)

    def train(self, mode: bool = True) -> "TeacherCriterion":
        """torch's; fairseq calls it before an update, so an unreadable teacher raises its error before the update."""
        if mode:
            self.teacher.read()
        return super().train(mode)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """fairseq's hook: True."""
        return True


class UnfitPairError(ValueError, RuntimeError):
    """A ValueError about a student and its teacher, raised at the beginning of the first update.

    It is a RuntimeError too, since for other errors fairseq's trainer saves weights in ``crash.pt``, needlessly here.
    """


@contextmanager
def check_of_pair() -> Iterator[None]:
    """Inside, a ValueError becomes an ``UnfitPairError``."""
    try:
        yield
    except ValueError as error:
        raise UnfitPairError(str(error)) from None


def bare(model: nn.Module) -> nn.Module:
    """``model`` without fairseq's wrappers for data parallelism."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _name(task: FairseqTask) -> str:
    """The name of ``task`` in ``--task``; fairseq's older tasks have their options in ``args``."""
    names = [getattr(getattr(task, options, None), "_name", None) for options in ("cfg", "args")]
    return names[0] or names[1] or type(task).__name__


def _family(task: FairseqTask) -> tuple[type | tuple[type, ...], str]:
    """The base class or classes of models for ``task``, and the name of fairseq's own model."""
    if isinstance(task, LanguageModelingTask):
        return FairseqLanguageModel, "transformer_lm"
    if isinstance(task, MaskedLMTask):
        return RobertaModel, "roberta"
    if isinstance(task, AudioFinetuningTask):
        return (Wav2VecCtc, Wav2Vec2Model), "wav2vec_ctc"
    if isinstance(task, AudioPretrainingTask):
        return Wav2Vec2Model, "wav2vec2"
    if isinstance(task, HubertPretrainingTask):
        return HubertModel, "hubert"
    return FairseqEncoderDecoderModel, "transformer"


def _load(path: str, task: FairseqTask) -> nn.Module:
    state, stored = read_training(path)
    family, stock = _family(task)
    if not issubclass(ARCH_MODEL_REGISTRY.get(stored, object), family):
        raise ValueError(
            f"--teacher {path!r} holds {stored!r}; allowed with --task {_name(task)}: {stock!r} and its like"
        )
    _check_dictionary(state, path, task)
    with configuration_errors(path):
        state = load_checkpoint_to_cpu(path, {**dict.fromkeys(EMBEDDING_FILES), **UNWRAPPED})
        config = state["cfg"].model
        # By fairseq's function, since the task's own may keep the model, as translation does for --eval-bleu.
        model = build_model(config, task, from_checkpoint=True)
    _load_weights(model, state["model"], config, path)
    return model


def _check_dictionary(state: dict[str, Any], path: str, task: FairseqTask) -> None:
    """Raise ValueError for another dictionary, also of the same size; only tasks of audio store theirs."""
    stored = (state.get("task_state") or {}).get("target_dictionary")
    if stored is not None and stored != task.target_dictionary:
        raise ValueError(
            f"--teacher {path!r} has another dictionary, {shortened(stored.symbols)}; allowed: that of the data, "
            f"{shortened(task.target_dictionary.symbols)}"
        )


def _load_weights(model: nn.Module, weights: dict[str, Any], config: Any, path: str) -> None:
    fitted = OrderedDict(weights)
    model.upgrade_state_dict(fitted)
    fitted = prune_state_dict(fitted, config)
    try:
        check_state_dict(fitted, model)
    except ValueError as error:
        raise ValueError(f"--teacher {path!r}: {error}{hint(fitted, model, config)}") from None
    model.load_state_dict(weights, strict=True, model_cfg=config)
