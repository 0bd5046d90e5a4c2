"""Recordings of noise, arguments of fairseq-train for small models of audio, and a model of letters."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import tasks
from torch import Tensor

import fairseq_plugin  # noqa: F401  registers the architectures

from .kinds import CONVOLUTIONS
from .text import PAD, dictionary
from .transfer import configuration, save_trained

#: Features of a frame of speech, and the most frames of a recording where an attention of ``kinds`` needs them.
FEATURES, MOST_FRAMES = 10, 60
_SMALL = (
    "--encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --dropout 0 "
    "--attention-dropout 0 --conv-pos 8 --conv-pos-groups 2 --final-dim 8 --extractor-mode layer_norm "
    "--mask-length 2 --depthwise-conv-kernel-size 5 --conv-feature-layers"
).split() + [CONVOLUTIONS]
#: Arguments of fairseq-train for a small wav2vec 2.0, without a criterion.
PRETRAINED = (*"--task audio_pretraining --quantize-targets --latent-vars 4 --num-negatives 5".split(), *_SMALL)
#: The same for a small HuBERT, without its task.
HUBERT = ("--criterion", "hubert", "--skip-nomask", *_SMALL)
#: Arguments of fairseq-train for a small model from speech to text, with its task.
SPEECH_TO_TEXT = (
    "--task speech_to_text --criterion label_smoothed_cross_entropy --conv-channels 16 --conv-kernel-sizes 3,3 "
    "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0 --max-source-positions 96 "
    "--max-target-positions 40"
).split()
#: Arguments of fairseq-train for fine-tuning to letters.
LETTERS = ("--task", "audio_finetuning", "--labels", "ltr")


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
