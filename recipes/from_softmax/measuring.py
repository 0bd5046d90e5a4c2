"""The loss of language models on held-out text, also with parts of their attention, and what a training changed."""

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

#: What is measured: the second one is reported.
SPLITS = ("valid", "test")
_MAX_TOKENS = 8_192


def losses(checkpoint: Path, data: Path) -> dict[str, float]:
    """Cross-entropy of a checkpoint in nats per token, the logarithm of its perplexity, by split.

    ``data`` is the folder of data. What fairseq-eval-lm computes, in blocks as long as those of the training.
    """
    return _losses(*_load(checkpoint, data))


def losses_of_parts(checkpoint: Path, data: Path) -> dict[str, dict[str, float]]:
    """``losses`` of a model whose attentions with a window are one of ``PARTS`` each time, by part."""
    model, task = _load(checkpoint, data)
    found = {}
    for part in PARTS:
        with attending(model, part):
            found[part] = _losses(model, task)
    return found


def changed_parameters(before: Path, after: Path) -> int:
    """The parameters of the checkpoint ``after`` in tensors that differ from those in ``before``, or are not there."""
    old, new = (read_checkpoint(path)["model"] for path in (before, after))
    return sum(x.numel() for name, x in new.items() if name not in old or not torch.equal(x, old[name]))


def _load(checkpoint: Path, data: Path) -> tuple[nn.Module, Any]:
    models, _, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides={"data": str(data)})
    return models[0].eval(), task


@torch.no_grad()
def _losses(model: nn.Module, task: Any) -> dict[str, float]:
    found = {}
    for split in SPLITS:
        task.load_dataset(split)
        longest = utils.resolve_max_positions(model.max_positions())
        batches = task.eval_lm_dataloader(
            task.dataset(split), _MAX_TOKENS, max_positions=longest, num_workers=0, data_buffer_size=0
        )
        result = eval_lm([model], task.source_dictionary, batches, target_dictionary=task.target_dictionary)
        found[split] = float(result["loss"]) * math.log(2)
    return found
