"""Multiply-adds, parameters and memory of models of either host, at any length or image size.

``python -m recipes.cost --arch flowformer_lm softmax_lm --tokens 512 2048`` and ``python -m recipes.cost --model
flowformer_hier_s deit_small_patch16_224 --img-size 224``. Any other option is one of fairseq-train's.
"""

import argparse
import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pandas as pd
import timm
import torch
from fairseq import tasks
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqEncoderDecoderModel
from timm.utils import ParseKwargs
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import timm_plugin  # noqa: F401  registers our models
from common.ops.shared.cpu.operators import FORMULAS
from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.data.series_folder import Description
from fairseq_plugin.models._classifier import LinearTimeClassifier
from fairseq_plugin.models._decision import DecisionModel
from fairseq_plugin.models._time_series import TimeSeriesClassifier

from .models import dictionary_of, model_options
from .runs import peak_bytes

#: Channels and classes of JapaneseVowels; entries of a state and of an action of HalfCheetah.
CHANNELS, CLASSES, STATE, ACTION = 12, 9, 17, 6
aten, Shape = torch.ops.aten, Sequence[int]
#: Operations without a formula in some versions of torch -> twice their multiply-adds.
FURTHER: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    ),
    aten.baddbmm_: lambda total, a, b, *_, **__: 2 * math.prod(a) * b[-1],
    aten.addmm_: lambda total, a, b, *_, **__: 2 * math.prod(a) * b[-1],
    aten.mv: lambda a, b, *_, **__: 2 * math.prod(a),
    aten.mkldnn_rnn_layer: lambda x, a, b, *_, **__: 2 * math.prod(x[:-1]) * (math.prod(a) + math.prod(b)),
    **FORMULAS,
}


class Subject(NamedTuple):
    """A model and one input."""

    model: nn.Module
    inputs: tuple[Any, ...] = ()
    named: Mapping[str, Any] = {}


def multiply_adds(call: Callable[[], Any]) -> int:
    """The multiply-adds of the matrix products and convolutions that ``call`` computes, those that a mask hides too."""
    with FlopCounterMode(display=False, custom_mapping=FURTHER) as counter:
        call()
    return counter.get_total_flops() // 2


def cost(subject: Subject, memory: bool = True) -> dict[str, Any]:
    """Parameters and multiply-adds of a forward pass, and the peaks in bytes of a forward pass and of a training step.

    The loss of the step is the sum of all outputs. A copy of the model is measured.
    """
    model = copy.deepcopy(subject.model).eval()

    def call() -> Any:
        return model(*subject.inputs, **subject.named)

    weights = [x for x in model.parameters() if x.requires_grad]
    model.requires_grad_(False)  # torch's counter fails if a module returns a parameter that requires a gradient
    with torch.no_grad():
        result = {"parameters": sum(x.numel() for x in model.parameters()), "multiply-adds": multiply_adds(call)}
        if not memory:
            return result
        inference = peak_bytes(lambda: [call()][:0], "cpu")  # outputs count as memory

    def step() -> None:
        outputs = [x for x in torch.utils._pytree.tree_leaves(call()) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(sum(x.float().sum() for x in outputs), weights, allow_unused=True)

    model.train()
    for x in weights:
        x.requires_grad_(True)
    return {**result, "training": peak_bytes(step, "cpu"), "inference": inference}


def timm_subject(name: str, side: int | None, kwargs: Mapping[str, Any]) -> Subject:
    """timm's model with random weights, for square images; without ``side`` for those of its own size."""
    sizes = {} if side is None or not hasattr(timm.create_model(name, **kwargs), "patch_embed") else {"img_size": side}
    model = timm.create_model(name, **kwargs, **sizes)
    channels, *size = model.default_cfg["input_size"]
    return Subject(model, (torch.randn(1, channels, *(size if side is None else (side, side))),))


def fairseq_subject(name: str, tokens: int, further: Sequence[str], vocabulary: int) -> Subject:
    """The model of ``fairseq-train --arch NAME FURTHER``, with an input of the longest length.

    ``tokens`` are steps of a time series, three tokens per step of a Decision Transformer, and tokens of both the
    source and the target of an encoder-decoder.
    """
    symbols, kind = dictionary_of(vocabulary), ARCH_MODEL_REGISTRY[name]
    words = torch.randint(4, vocabulary, (1, tokens))
    lengths, inputs, named = ("--tokens-per-sample", tokens), (words,), {}
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols, max_positions=lambda: tokens)
    if issubclass(kind, TimeSeriesClassifier):
        of = "time_series_classification"
        labels, zeros = [str(i) for i in range(CLASSES)], [0.0] * CHANNELS
        description = Description(labels, zeros, [1.0] * CHANNELS, tokens)
        task, lengths = SimpleNamespace(description=description, max_length=tokens), ()
        inputs, named = (torch.randn(1, tokens, CHANNELS),), {"classification_head_name": "head"}
    elif issubclass(kind, DecisionModel):
        of, steps = "offline_rl", max(1, tokens // 3)
        numbers = ([0.0] * STATE, [1.0] * STATE, [-1.0] * ACTION, [1.0] * ACTION, steps, 0.0, 0.0, 0.0)
        description = EpisodeDescription("random", "", *numbers)
        task = SimpleNamespace(description=description, context=steps, max_episode_length=max(1000, steps))
        sizes, lengths, inputs = {"returns": 1, "states": STATE, "actions": ACTION}, (), ()
        named = {key: torch.randn(1, steps, size) for key, size in sizes.items()}
        named["timesteps"] = torch.arange(steps)[None]
    elif issubclass(kind, LinearTimeClassifier):
        of, named = "sentence_prediction", {"classification_head_name": "head"}
        lengths = ("--criterion", of, "--max-positions", tokens, "--num-classes", CLASSES)
    elif issubclass(kind, FairseqEncoderDecoderModel):
        of, lengths = "translation", ("--max-source-positions", tokens, "--max-target-positions", tokens)
        inputs = (words, torch.full((1,), tokens), words)
    else:
        of = "masked_lm" if name.endswith("_mlm") or "roberta" in name else "language_modeling"
    torch.manual_seed(1)
    words = ["data", "--task", of, "--arch", name, *lengths, *further]
    model = tasks.FairseqTask.build_model(task, model_options(words))
    if "classification_head_name" in named:
        model.register_classification_head("head", num_classes=CLASSES)
    return Subject(model, inputs, named)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each model and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=__doc__.splitlines()[-1])
    parser.add_argument("--arch", nargs="+", default=[], metavar="NAME", help="architectures of fairseq")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512], metavar="N", help="lengths (512)")
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME", help="models of timm")
    parser.add_argument("--img-size", nargs="+", type=int, default=[None], metavar="N", help="default: each model's")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs, metavar="K=V", help="for timm")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="symbols, fairseq's four included (%(default)s)")
    parser.add_argument("--no-memory", action="store_true", help="count alone, in one forward pass")
    options, further = parser.parse_known_args(arguments)
    wrong = [x for x in options.arch if x not in ARCH_MODEL_REGISTRY]
    wrong += [x for x in options.model if not timm.is_model(x)] + further * (not options.arch)
    if wrong or not (options.arch or options.model):
        allowed = "allowed: --arch of fairseq-train with its options, --model of timm.list_models()"
        parser.error(f"given: {' '.join(wrong) or 'no model'}; {allowed}")
    torch.set_num_threads(1)
    cases = [*itertools.product(options.arch, options.tokens), *itertools.product(options.model, options.img_size)]
    rows = []
    for name, size in cases:
        if name in options.arch:
            subject = fairseq_subject(name, size, further, options.vocabulary)
        else:
            subject = timm_subject(name, size, options.model_kwargs)
        found = cost(subject, not options.no_memory)
        row = {"model": name, "size": "its own" if size is None else f"{size:,}"}
        row |= {"parameters": f"{found.pop('parameters') / 1e6:.2f} M"}
        row |= {"multiply-adds": f"{found.pop('multiply-adds') / 1e9:.3f} G"}
        rows.append(row | {f"{x} memory": f"{peak / 2**20:,.1f} MiB" for x, peak in found.items()})
    print(pd.DataFrame(rows).to_markdown(index=False))


if __name__ == "__main__":
    main()
