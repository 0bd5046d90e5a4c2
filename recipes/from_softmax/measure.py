"""The losses of language models, how far back they read, and the losses with parts of their attention alone."""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq_cli.eval_lm import eval_lm
from torch import nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import InnerAttention, LolcatsAttention

from .. import positions
from . import needles
from .forms import PARTS, attending

#: Needles that are looked for at each distance.
_TRIALS = 64
#: Windows of the test text that are read for perplexity by position, at most.
WINDOWS = 48


def load(checkpoint: Path, data: Path, **overrides: Any) -> tuple[nn.Module, Any]:
    """The model of a checkpoint, in evaluation mode, and its task; ``overrides`` are options of either."""
    options = {"data": str(data), **overrides}
    models, _, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides=options)
    return models[0].eval(), task


@torch.no_grad()
def loss(model: nn.Module, task: Any) -> float:
    """Cross-entropy of the test text in nats per token, as fairseq-eval-lm computes it, in blocks of training."""
    task.load_dataset("test")
    sizes = {"max_positions": utils.resolve_max_positions(model.max_positions()), "data_buffer_size": 0}
    batches = task.eval_lm_dataloader(task.dataset("test"), 8_192, num_workers=0, **sizes)
    result = eval_lm([model], task.source_dictionary, batches, target_dictionary=task.target_dictionary)
    return float(result["loss"]) * math.log(2)


@torch.no_grad()
def needles_found(model: nn.Module, data: Path, length: int) -> dict[int, float]:
    """Per cent of the needles in the test text that a model finds, by distance: its most probable tokens."""
    text, symbols, found = positions.read_stream(data), needles.symbols_of(data), {}
    for distance in needles.distances(length):
        asked = needles.questions(text, length, distance, _TRIALS, symbols)
        answers = model(asked[:, :-1])[0][:, -needles.ANSWER :].argmax(-1)
        found[distance] = 100.0 * float((answers == asked[:, -needles.ANSWER :]).double().mean())
    return found


def measured(checkpoint: Path, options: argparse.Namespace, everything: bool) -> dict[str, Any]:
    """The loss of a checkpoint, or all of its results; ``options`` are those of ``compare``."""
    model, task = load(checkpoint, options.data)
    found: dict[str, Any] = {"test": loss(model, task)}
    if not everything:
        return found
    length = options.tokens_per_sample
    found |= {"needles": needles_found(model, options.data, length), "positions": {}}
    attentions = [module for module in model.modules() if isinstance(module, InnerAttention)]
    if any(isinstance(module, LolcatsAttention) for module in attentions):
        for part in PARTS:
            with attending(model, part):
                found[part] = loss(model, task)
    if not any("max_tokens" in module.needs for module in attentions):  # else its formula would change
        windows = positions.windows(positions.read_stream(options.data), length, options.longest, WINDOWS)
        model, _ = load(checkpoint, options.data, max_target_positions=options.longest)
        found["positions"] = positions.perplexities(positions.losses(model, windows, checkpoint.name), length)
    return found
