"""Small models of audio, built through fairseq's own parser, and recordings of noise."""

import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import tasks
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import ATTENTIONS
from recipes.models import model_options

from .kinds import SHORT
from .language_models import flags_of
from .text import PAD, dictionary
from .transfer import configuration, save_trained

#: A frame begins every 8 samples and reads 18.
CONVOLUTIONS = "[(16, 6, 2)] + [(16, 3, 2)] * 2"
_SMALL = (
    "--encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --dropout 0 "
    "--attention-dropout 0 --conv-pos 8 --conv-pos-groups 2 --final-dim 8 --extractor-mode layer_norm "
    "--mask-length 2 --depthwise-conv-kernel-size 5"
).split()
_TASKS = {
    "wav2vec2": (
        "audio_pretraining",
        "wav2vec",
        "--quantize-targets",
        "--latent-vars",
        "4",
        "--num-negatives",
        "5",
    ),
    "data2vec_audio": ("audio_pretraining", "model", "--average-top-k-layers", "2"),
    "hubert": ("hubert_pretraining", "hubert", "--label-rate", "2000", "--labels", "['km']", "--skip-nomask"),
}
_SPEECH = (
    "--task speech_to_text --conv-channels 16 --conv-kernel-sizes 3,3 --encoder-layers 2 "
    "--decoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2 --dropout 0 --max-source-positions 96 "
    "--max-target-positions 40"
).split()
#: Features of a frame of speech, and the most frames of a recording where an attention needs them.
FEATURES, MOST_FRAMES = 10, 60
#: Arguments of fairseq-train for a small wav2vec 2.0, without a criterion.
PRETRAINED = ("--task", _TASKS["wav2vec2"][0], *_TASKS["wav2vec2"][2:], *_SMALL)
PRETRAINED += ("--conv-feature-layers", CONVOLUTIONS)
#: The same for a small HuBERT, without its task.
HUBERT = ("--criterion", "hubert", "--skip-nomask", *_SMALL, "--conv-feature-layers", CONVOLUTIONS)
#: Arguments of fairseq-train for a small model from speech to text, with its task.
SPEECH_TO_TEXT = (*_SPEECH, "--criterion", "label_smoothed_cross_entropy")
#: Arguments of fairseq-train for fine-tuning to letters.
LETTERS = ("--task", "audio_finetuning", "--labels", "ltr")


def _kind(arch: str) -> str:
    """fairseq's model of audio of which ``arch`` is one."""
    return next(kind for kind in _TASKS if arch.endswith(kind))


@cache
def _short_sizes(arch: str) -> tuple[str, ...]:
    """Options with which toy recordings cross several chunks and windows, and the frames of the longest one."""
    flags = flags_of(arch) if arch not in (*_TASKS, "s2t_transformer", "s2t_conformer") else []
    known = [x for ending, value in SHORT.items() for flag in flags if flag.endswith(ending) for x in (flag, value)]
    attention = None if arch.startswith("s2t") else ATTENTIONS.get(arch.removesuffix(f"_{_kind(arch)}"))
    needs = "max_tokens" in getattr(attention, "needs", ())
    known += ["--lolcats-window", "4"] if "lolcats" in arch else []  # frames outside of it, too
    return (*known, *(["--lineartime-max-frames", str(MOST_FRAMES)] if needs else []))


def build_audio(arch: str, *arguments: str, seed: int = 1, short: bool = True) -> nn.Module:
    """The model that ``fairseq-train --arch ARCH ARGUMENTS`` builds, a wav2vec 2.0, a HuBERT or a data2vec, small.

    ``short`` sets sizes of chunks and windows, and the frames of the longest recording, if there is such an option.
    """
    task, criterion, *further = _TASKS[_kind(arch)]
    command = ["data", "--task", task, "--criterion", criterion, "--arch", arch, *_SMALL, *further]
    command += ["--conv-feature-layers", CONVOLUTIONS, *(_short_sizes(arch) if short else ()), *arguments]
    host = SimpleNamespace(cfg=SimpleNamespace(sample_rate=16_000), dictionaries=[dictionary()])
    torch.default_generator.manual_seed(seed)
    return tasks.FairseqTask.build_model(host, model_options(command))


def build_speech(arch: str, *arguments: str, seed: int = 1, short: bool = True) -> nn.Module:
    """The model that ``fairseq-train --task speech_to_text --arch ARCH ARGUMENTS`` builds, as ``build_audio`` does."""
    sizes = [*_SPEECH, *(_short_sizes(arch) if short else ())]
    sizes += ["--depthwise-conv-kernel-size", "5"] if "conformer" in arch else []
    given = model_options(["data", "--arch", arch, *sizes, *arguments])
    given.input_feat_per_channel, given.input_channels = FEATURES, 1  # as the task sets them
    symbols = dictionary()
    torch.default_generator.manual_seed(seed)
    return tasks.FairseqTask.build_model(SimpleNamespace(source_dictionary=None, target_dictionary=symbols), given)


def save_ctc(path: Path, arch: str, seed: int) -> None:
    """Write a checkpoint of fairseq's ``wav2vec_ctc`` on a small wav2vec 2.0 ``arch``, with its dictionary."""
    letters = ("--arch", "wav2vec_ctc", "--w2v-path", "none", "--criterion", "ctc")
    config = copy.deepcopy(configuration("data", *LETTERS, *letters))
    config.model.w2v_args = configuration("data", "--arch", arch, *PRETRAINED, "--criterion", "wav2vec")
    symbols = dictionary()
    host = SimpleNamespace(target_dictionary=symbols)
    torch.default_generator.manual_seed(seed)
    save_trained(path, config, tasks.FairseqTask.build_model(host, config.model), target_dictionary=symbols)


def letters_sample(padding: int, seed: int = 0) -> dict[str, Any]:
    """Two recordings of 300 samples, the second with ``padding`` in it, and their letters."""
    mask = torch.zeros(2, 300, dtype=torch.bool)
    mask[1, 300 - padding :] = True
    net_input = {"source": recording(2, 300, seed).masked_fill(mask, 0.0), "padding_mask": mask}
    letters = torch.tensor([[5, 6, 4], [6, 4, PAD]])
    return {"id": torch.arange(2), "net_input": net_input, "target": letters, "ntokens": 5}


def recording(batch: int, samples: int, seed: int = 0) -> Tensor:
    """Noise (batch, samples)."""
    return torch.randn(batch, samples, generator=torch.Generator().manual_seed(seed))
