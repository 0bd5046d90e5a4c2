"""A tiny trained Transformer of fairseq and what ``convert`` makes of it, for tests of learning from a teacher."""

import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import options
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_plugin.convert import convert
from fairseq_plugin.criterions.attention_transfer import AttentionTransferCriterion
from fairseq_plugin.criterions.distillation import DistillationCriterion

from .text import PAD, dictionary, tokens

#: The teachers, by the kind of model.
TEACHERS = {
    "lm": "--task language_modeling --arch transformer_lm --decoder-layers 3 --decoder-embed-dim 16 "
    "--decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
    "--decoder-normalize-before --tokens-per-sample 64",
    "mlm": "--task masked_lm --arch roberta --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --tokens-per-sample 64 --max-positions 64",
    "translation": "--task translation --arch transformer --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 "
    "--decoder-embed-dim 16 --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2",
}


class Pair(NamedTuple):
    """A teacher's file, and a student that begins with its weights."""

    kind: str
    task: FairseqTask
    path: str
    student: nn.Module

    def trainer(self, criterion: FairseqCriterion, save_dir: Path) -> Trainer:
        """fairseq's trainer of the student, on a CPU, with a new folder for checkpoints."""
        save_dir.mkdir()
        arguments = ("--cpu", "--optimizer", "adam", "--lr", "0.01", "--save-dir", str(save_dir))
        return Trainer(_of_kind(self.kind, arguments), self.task, self.student, criterion)

    def transfer(self, loss: str = "outputs", window_dropout: float = 0.0) -> AttentionTransferCriterion:
        """``--criterion attention_transfer``."""
        return AttentionTransferCriterion(self.task, self.path, loss, window_dropout, "pytorch_ddp", 1)

    def distillation(self, temperature: float = 2.0, weight: float = 0.5) -> DistillationCriterion:
        """``--criterion distillation``."""
        return DistillationCriterion(self.task, self.path, temperature, weight, False, "pytorch_ddp")


def make_task(kind: str, words: int = 60) -> FairseqTask:
    """fairseq's task for models of this ``kind``, without data."""
    if kind == "lm":
        return LanguageModelingTask(LanguageModelingConfig(), dictionary(words))
    if kind == "mlm":
        return MaskedLMTask(MaskedLMConfig(), dictionary(words))
    return TranslationTask(TranslationConfig(), dictionary(words), dictionary(words))


def save_teacher(path: Path, kind: str, *arguments: str, words: int = 60) -> nn.Module:
    """Write a checkpoint of a teacher, as fairseq-train does, and return the model."""
    config = _of_kind(kind, arguments)
    torch.manual_seed(3)
    model = build_model(copy.deepcopy(config.model), make_task(kind, words))
    for parameter in model.parameters():  # weights under which attention shows
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
    save_trained(path, config, model)
    return model.eval()


def save_trained(path: Path, config: Any, model: nn.Module, **task_state: Any) -> None:
    """Write a checkpoint of ``model``, of the configuration ``config``, as fairseq-train does."""
    history = [{"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam", "num_updates": 7}]
    history[0]["lr_scheduler_state"] = {"best": None}
    extra = {"train_iterator": {"epoch": 2, "iterations_in_epoch": 0, "version": 2}, "val_loss": 4.2}
    state = {"args": None, "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True)}
    state |= {"model": model.state_dict(), "optimizer_history": history, "extra_state": extra}
    torch.save({**state, "criterion": None, "task_state": task_state}, path)


def _of_kind(kind: str, arguments: tuple[str, ...]) -> Any:
    return configuration("data", *TEACHERS[kind].split(), *arguments)


@cache
def configuration(*command: str) -> Any:
    """What fairseq-train makes of the command line; it takes most of a second."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), list(command)))


def make_pair(folder: Path, kind: str, arch: str, teacher: tuple[str, ...] = (), **overrides: Any) -> Pair:
    """A teacher, and a student with the attention ``arch`` whose new parameters alone learn, both with padding to see.

    ``overrides`` are options of the student.
    """
    path, task = folder / "teacher.pt", make_task(kind)
    save_teacher(path, kind, *teacher)
    overrides = {"lineartime_trained_parameters": "new", **overrides}
    torch.save(convert(path, arch, overrides)[0], folder / "start.pt")
    (student,), *_ = load_model_ensemble_and_task([str(folder / "start.pt")], task=task)
    return Pair(kind, task, str(path), student.train())


def make_sample(kind: str, batch: int = 3, length: int = 13, left: int = 0, right: int = 0, seed: int = 0) -> dict:
    """A batch whose first row has ``left`` and last row ``right`` padding; sources are longer than targets."""
    source, target = (_with_padding(tokens(batch, length + more, seed + more), left, right) for more in (0, 1))
    if kind == "lm":
        net_input = {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}
        goal = target[:, 1:].masked_fill(source.eq(PAD), PAD)
    elif kind == "mlm":
        net_input = {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}
        goal = source.masked_fill(torch.arange(source.shape[1]) % 3 != 1, PAD)
    else:
        long = _with_padding(tokens(batch, length + 4, seed + 5), left, right)
        net_input = {"src_tokens": long, "src_lengths": long.ne(PAD).sum(1), "prev_output_tokens": source}
        goal = target[:, 1:].masked_fill(source.eq(PAD), PAD)
    count = int((source if kind == "mlm" else goal).ne(PAD).sum())
    return {"net_input": net_input, "target": goal, "ntokens": count, "nsentences": batch}


def _with_padding(sequence: Tensor, left: int, right: int) -> Tensor:
    sequence = sequence.clone()
    sequence[0, :left] = PAD
    sequence[-1, sequence.shape[1] - right :] = PAD
    return sequence
