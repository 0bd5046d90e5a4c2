"""Small masked models, built through fairseq's own parser, with weights under which attention shows."""

import torch
from torch import nn

from .language_models import build


def small(arch: str) -> list[str]:
    """Options that make ``arch`` small, with chunks and rows so short that toy sequences cross several."""
    command = "--encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64".split()
    if arch in ("flash_mlm", "flash_quad_mlm"):
        command += ["--flash-query-dim", "16"]
    else:
        command += ["--encoder-attention-heads", "4"]
    if arch in ("flash_mlm", "mc_transformer_pp_mlm"):
        command += ["--flash-chunk-size", "16"]
    return [*command, "--flash-row-length", "8"] if arch == "combiner_mlm" else command


def build_masked(arch: str, *arguments: str, seed: int = 1, sizes: bool = True, words: int = 60) -> nn.Module:
    """The model that ``fairseq-train --task masked_lm --arch ARCH ARGUMENTS`` builds, small if ``sizes``."""
    command = ["data", "--task", "masked_lm", "--criterion", "masked_lm", "--arch", arch]
    command += [*(small(arch) if sizes else ()), "--tokens-per-sample", "128", *arguments]
    return build(command, words, seed)


def randomised(model: nn.Module, std: float = 0.5, seed: int = 2) -> nn.Module:
    """``model`` with every parameter N(0, std): as initialised, attention adds too little to any output to be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model
