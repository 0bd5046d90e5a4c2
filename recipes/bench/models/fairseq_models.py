"""Language models as fairseq-train builds them, of one shape for all architectures."""

import warnings
from types import SimpleNamespace

import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.gau import GatedAttentionUnit

from ..work import Settings

#: So few that the output layer is small beside the rest; four more are fairseq's.
_WORDS = 996


def build(architecture: str, width: int, layers: int, positions: int, settings: Settings) -> nn.Module:
    """The model of ``layers`` layers with heads of 64 channels, from a fixed seed and without dropout.

    Two gated attention units stand for one layer of a Transformer. Layers are pre-norm. ``positions`` is the longest
    length.
    """
    command = ["data", "--task", "language_modeling", "--arch", architecture, "--dropout", "0"]
    command += ["--share-decoder-input-output-embed", "--tokens-per-sample", str(positions)]
    for option in ("embed", "input", "output"):
        command += [f"--decoder-{option}-dim", str(width)]
    units = architecture == "flash_lm"
    command += ["--decoder-layers", str(2 * layers if units else layers)]
    if not units:
        command += ["--decoder-attention-heads", str(width // 64)]
    if architecture in ("flowformer_lm", "softmax_lm", "transformer_lm"):
        command += ["--decoder-ffn-embed-dim", str(4 * width), "--decoder-normalize-before"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq's own use of an older hydra
        parsed = options.parse_args_and_arch(options.get_training_parser(), command)
        config = convert_namespace_to_omegaconf(parsed)
    symbols = Dictionary()
    for i in range(_WORDS):
        symbols.add_symbol(f"w{i}")
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    return settings.to(_awake(tasks.FairseqTask.build_model(task, config.model)))


def _awake(model: nn.Module) -> nn.Module:
    """``model`` with weights under which attention shows: that of FLASH begins near zero, and so would any error."""
    for unit in model.modules():
        if isinstance(unit, GatedAttentionUnit):
            nn.init.normal_(unit.in_proj.weight, std=2.0 * unit.dim**-0.5)
            nn.init.normal_(unit.out_proj.weight, std=unit.expanded_dim**-0.5)
            nn.init.normal_(unit.gamma)
            nn.init.normal_(unit.beta)
            for parameter in unit.bias.parameters():
                nn.init.normal_(parameter, std=0.3)
    return model


def random_tokens(settings: Settings, size: int) -> Tensor:
    """One sequence of random words (1, ``size``), none of them padding."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(4, _WORDS, (1, size), generator=generator).to(settings.device)
