"""The loss of language models on held-out text, also with parts of their attention, and what training changed."""

import math
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq_cli.eval_lm import eval_lm
from torch import nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.checkpoints import read_checkpoint

from .parts import PARTS, attending

#: The splits that are measured; the second one is reported.
SPLITS = ("valid", "test")
_MAX_TOKENS = 8_192


def losses(checkpoint: Path, data: Path) -> dict[str, float]:
    """Cross-entropy of a checkpoint in nats per token, the logarithm of its perplexity, by split.

    It is what fairseq-eval-lm computes, in blocks of the training's length. ``data`` is the data-bin folder.
    """
    return _losses(*load(checkpoint, data))


def losses_of_parts(checkpoint: Path, data: Path) -> dict[str, dict[str, float]]:
    """``losses`` for each of ``PARTS``, used in place of the model's attentions with a window."""
    model, task = load(checkpoint, data)
    losses_by_part = {}
    for part in PARTS:
        with attending(model, part):
            losses_by_part[part] = _losses(model, task)
    return losses_by_part


def changed_parameters(before: Path, after: Path) -> int:
    """Number of parameters in tensors of the checkpoint ``after`` that differ from ``before`` or are new."""
    old, new = (read_checkpoint(path)["model"] for path in (before, after))
    return sum(x.numel() for name, x in new.items() if name not in old or not torch.equal(x, old[name]))


def load(checkpoint: Path, data: Path, **overrides: Any) -> tuple[nn.Module, Any]:
    """The model of a checkpoint, in evaluation mode, and its task; ``overrides`` are options of either."""
    options = {"data": str(data), **overrides}
    models, _, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides=options)
    return models[0].eval(), task


@torch.no_grad()
def _losses(model: nn.Module, task: Any) -> dict[str, float]:
    losses_by_split = {}
    for split in SPLITS:
        task.load_dataset(split)
        longest = utils.resolve_max_positions(model.max_positions())
        batches = task.eval_lm_dataloader(
            task.dataset(split), _MAX_TOKENS, max_positions=longest, num_workers=0, data_buffer_size=0
        )
        result = eval_lm([model], task.source_dictionary, batches, target_dictionary=task.target_dictionary)
        losses_by_split[split] = float(result["loss"]) * math.log(2)
    return losses_by_split
