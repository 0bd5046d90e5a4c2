"""Checkpoints between trainings: the encoder of a model of CTC as a teacher, and another encoder in its place."""

from pathlib import Path
from typing import Any

import torch

from common.checkpoints import read_checkpoint
from common.modules.stored_options import is_extra_state
from fairseq_plugin.convert import convert

#: The prefix of the encoder's parameters in fairseq's ``wav2vec_ctc``.
_ENCODER = "w2v_encoder.w2v_model."


def write_converted(source: Path, path: Path, architecture: str, overrides: dict[str, Any]) -> None:
    """Write the stock wav2vec 2.0 in ``source`` with the attention of ``architecture``, unless ``path`` exists."""
    if not path.exists():
        torch.save(convert(source, architecture, overrides)[0], path)


def write_teacher(start: Path, tuned: Path, path: Path) -> None:
    """Write the encoder of ``tuned``, which was fine-tuned from the wav2vec 2.0 in ``start``, as a wav2vec 2.0.

    Anything that only pretraining needs is that of ``start``. It masks no inputs, so that attentions are compared on
    whole ones.
    """
    if not path.exists():
        teacher, weights = read_checkpoint(start), read_checkpoint(tuned)["model"]
        encoder = {name: weights[_ENCODER + name] for name in teacher["model"] if _ENCODER + name in weights}
        teacher["model"] = {**teacher["model"], **encoder}
        teacher["cfg"]["model"]["mask_prob"] = 0.0
        torch.save(teacher, path)


def write_joined(tuned: Path, teacher: Path, student: Path, path: Path) -> None:
    """Write ``tuned``, whose encoder is that of ``teacher``, with the encoder of ``student`` in its place."""
    if not path.exists():
        joined, encoder = read_checkpoint(tuned), read_checkpoint(student)
        removed = {x for x in read_checkpoint(teacher)["model"] if _ENCODER + x not in joined["model"]}
        kept = {_ENCODER + name: x for name, x in encoder["model"].items() if name not in removed}
        head = {name: x for name, x in joined["model"].items() if not name.startswith(_ENCODER)}
        joined["model"] = {**head, **kept}
        joined["cfg"]["model"]["w2v_args"] = encoder["cfg"]
        torch.save(joined, path)


def learns_maps(checkpoint: Path) -> bool:
    """Whether the attention of a converted model has parameters that softmax attention lacks."""
    return any(".inner." in name and not is_extra_state(name) for name in read_checkpoint(checkpoint)["model"])
