"""Language models and translators as fairseq-train builds them, in one shape for all architectures."""

from types import SimpleNamespace

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.modules.gated_attention_unit import GatedAttentionUnit

from ...shared.fairseq_models import model_options
from ..harness.work import Settings

#: Words of the vocabulary: few, so that the output layer is small; fairseq adds four symbols.
_WORDS = 996


def build(architecture: str, width: int, layers: int, positions: int, settings: Settings) -> nn.Module:
    """A model with ``layers`` pre-norm layers and heads of at most 64 channels, from a fixed seed, without dropout.

    Two gated attention units count as one layer. ``positions`` is the longest length. Model options may follow the
    name of the ``architecture``, as in "linear_lm --linear-forget head".
    """
    architecture, *options = architecture.split()
    command = ["data", "--task", "language_modeling", "--arch", architecture, *options, "--dropout", "0"]
    command += ["--share-decoder-input-output-embed", "--tokens-per-sample", str(positions)]
    for option in ("embed", "input", "output"):
        command += [f"--decoder-{option}-dim", str(width)]
    units = architecture in ("flash_lm", "flash_quad_lm")
    command += ["--decoder-layers", str(2 * layers if units else layers)]
    if not units:
        command += ["--decoder-attention-heads", str(max(1, width // 64))]
    if not units and architecture != "transformer_pp_lm":  # Transformer++ has a feed-forward block of its own
        command += ["--decoder-ffn-embed-dim", str(4 * width), "--decoder-normalize-before"]
    return settings.to(_with_visible_attention(_built(command)))


def build_translator(
    architecture: str, cross: str, width: int, layers: int, source: int, target: int, settings: Settings
) -> nn.Module:
    """A translation model with ``layers`` decoder layers and heads of 64 channels, from a fixed seed.

    ``cross`` is the attention to the encoder, ``source`` and ``target`` are the longest lengths. The encoder has no
    layers: its output is its embedded tokens, so that a long source costs nothing to prepare.
    """
    command = ["data", "--task", "translation", "--arch", architecture, "--dropout", "0", "--encoder-layers", "0"]
    command += ["--decoder-layers", str(layers), "--share-decoder-input-output-embed"]
    command += ["--max-source-positions", str(source), "--max-target-positions", str(target)]
    for side in ("encoder", "decoder"):
        command += [f"--{side}-embed-dim", str(width), f"--{side}-ffn-embed-dim", str(4 * width)]
        command += [f"--{side}-attention-heads", str(width // 64)]
    if architecture != "transformer":
        command += ["--lineartime-cross-attention", cross]
    model = settings.to(_built(command))
    model.make_generation_fast_(need_attn=False)  # as fairseq-generate does
    return model


def build_audio(architecture: str, width: int, layers: int, settings: Settings) -> nn.Module:
    """A wav2vec 2.0 with heads of 64 channels and a small feature extractor, from a fixed seed, without dropout."""
    command = ["data", "--task", "audio_pretraining", "--criterion", "wav2vec", "--arch", architecture]
    command += ["--conv-feature-layers", "[(64, 10, 5)] + [(64, 3, 2)] * 4 + [(64, 2, 2)] * 2"]
    command += ["--extractor-mode", "layer_norm", "--layer-norm-first", "--encoder-layers", str(layers)]
    command += ["--encoder-embed-dim", str(width), "--encoder-ffn-embed-dim", str(4 * width)]
    command += ["--encoder-attention-heads", str(width // 64), "--dropout", "0", "--attention-dropout", "0"]
    torch.manual_seed(1)
    return settings.to(tasks.FairseqTask.build_model(SimpleNamespace(), model_options(command)))


def random_recording(settings: Settings, samples: int) -> Tensor:
    """Noise (1, samples)."""
    return settings.to(torch.randn(1, samples, generator=torch.Generator().manual_seed(0)))


def _built(command: list[str]) -> nn.Module:
    """The model that ``fairseq-train`` builds for ``command``, from a fixed seed."""
    symbols = Dictionary()
    for i in range(_WORDS):
        symbols.add_symbol(f"w{i}")
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    return tasks.FairseqTask.build_model(task, model_options(command))


def _with_visible_attention(model: nn.Module) -> nn.Module:
    """Give FLASH's units larger weights: they start near zero, which would hide an error in attention."""
    for unit in model.modules():
        if isinstance(unit, GatedAttentionUnit):
            nn.init.normal_(unit.in_proj.weight, std=2.0 * unit.dim**-0.5)
            nn.init.normal_(unit.out_proj.weight, std=unit.expanded_dim**-0.5)
            nn.init.normal_(unit.gamma)
            nn.init.normal_(unit.beta)
            for parameter in unit.bias.parameters():
                nn.init.normal_(parameter, std=0.3)
    return model


def random_tokens(settings: Settings, size: int, rows: int = 1) -> Tensor:
    """Sequences of random words (``rows``, ``size``) without padding."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(4, _WORDS, (rows, size), generator=generator).to(settings.device)
