"""Small encoder-decoders, built through fairseq's own parser."""

from types import SimpleNamespace

import torch
from fairseq import options, tasks
from torch import nn

import fairseq_plugin  # noqa: F401  registers the architectures

from .language_models import awake
from .text import dictionary

#: A size in which everything takes milliseconds; half of the tokens of a batch may pass the longest one.
SMALL = (
    "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0 "
    "--max-source-positions 48 --max-target-positions 40"
).split()


def build_model(arch: str, *arguments: str, seed: int = 1) -> nn.Module:
    """The model that ``fairseq-train --task translation --arch ARCH ARGUMENTS`` builds, small, in evaluation mode.

    It has weights under which attention shows in its outputs.
    """
    command = ["data", "--task", "translation", "--arch", arch, *SMALL, *arguments]
    parsed = options.parse_args_and_arch(options.get_training_parser(), command)
    symbols = dictionary()
    torch.default_generator.manual_seed(seed)
    model = tasks.FairseqTask.build_model(SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols), parsed)
    for parameter in awake(model).parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.4)
    return model.eval()
