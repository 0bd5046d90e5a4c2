"""Small language models, built through fairseq's own parser."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from fairseq import tasks
from torch import nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import DaftConvAttention, DaftFullAttention, MixedChunkAttention
from common.modules.gated_attention_unit import GatedAttentionUnit
from recipes.models import model_options

from .text import dictionary

ARCHITECTURES = (
    *("flowformer_lm", "flowformer_lm_wiki103", "linear_lm", "softmax_lm", "flash_lm", "flash_quad_lm"),
    *("transformer_plus_lm", "transformer_pp_lm", "mc_transformer_pp_lm", "performer_lm", "combiner_lm"),
    *("daft_full_lm", "daft_conv_lm"),
)
SMALL = (
    "--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 "
    "--decoder-ffn-embed-dim 64 --decoder-attention-heads 4"
).split()
#: Chunks, rows and windows so short that toy sequences cross many of them.
CHUNKS = {
    "flowformer_lm": ("--flow-chunk-size", "16"),
    "linear_lm": ("--linear-chunk-size", "16"),
    "flash_lm": ("--flash-chunk-size", "16"),
    "flash_lm_base": ("--flash-chunk-size", "16"),
    "mc_transformer_pp_lm": ("--flash-chunk-size", "16"),
    "combiner_lm": ("--flash-row-length", "8"),
    "daft_full_lm": ("--daft-bias-dim", "12"),
    "daft_conv_lm": ("--daft-window", "9"),
}


def small(arch: str) -> list[str]:
    """Options that make any architecture small."""
    return [*SMALL, *CHUNKS.get(arch, ())]


def build(command: Sequence[str], words: int = 60, seed: int = 1) -> nn.Module:
    """The model that ``fairseq-train COMMAND`` builds for a dictionary of ``words``.

    From what the parser returns. fairseq-train turns that into another kind of configuration before, which takes most
    of a second; what models/test_contract.py stores is of that kind.
    """
    given = model_options(command)
    symbols = dictionary(words)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    torch.default_generator.manual_seed(seed)
    return tasks.FairseqTask.build_model(task, given)


def build_model(arch: str, *arguments: str, seed: int = 1, sizes: Sequence[str] | None = None, words: int = 60):
    """The model that ``fairseq-train --arch ARCH SIZES ARGUMENTS`` builds, small unless told otherwise."""
    sizes = small(arch) if sizes is None else sizes
    command = ["data", "--task", "language_modeling", "--arch", arch, *sizes, "--tokens-per-sample", "256", *arguments]
    return build(command, words, seed)


def awake(model: nn.Module) -> nn.Module:
    """``model`` with weights under which attention shows in the logits.

    As initialised, that of FLASH is near zero, and so are the position biases of DAFT.
    """
    for module in model.modules():
        if isinstance(module, GatedAttentionUnit):
            nn.init.normal_(module.in_proj.weight, std=2.0 * module.dim**-0.5)
            nn.init.normal_(module.out_proj.weight, std=module.expanded_dim**-0.5)
            for parameter in module.bias.parameters() if module.bias is not None else ():
                nn.init.normal_(parameter, std=0.3)
        if isinstance(module, (GatedAttentionUnit, MixedChunkAttention)):
            nn.init.normal_(module.gamma)
            nn.init.normal_(module.beta)
        if isinstance(module, DaftFullAttention):  # biases of deviation 1
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=(module.options.bias_dim or 1) ** -0.25)
        if isinstance(module, DaftConvAttention):  # filters of deviation 1 to 2 about a mean of -2 to 2
            nn.init.normal_(module.r)
            for parameter, low, high in ((module.gamma, 1.0, 2.0), (module.beta, -2.0, 2.0)):
                if parameter is not None:
                    nn.init.uniform_(parameter, low, high)
    return model
