"""The bases of ``NAME_wav2vec2`` and ``NAME_hubert``: fairseq's models of raw audio with another attention.

The feature extractor, positions, masking, quantisation, targets and losses are fairseq's, and so are the tasks and
criteria that train the models, and ``wav2vec_ctc``, ``wav2vec_seq2seq``, ``hubert_seq2seq`` and others, which fine-tune
them.
"""

from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any, Optional

import torch
from fairseq.models.hubert.hubert import HubertConfig, HubertModel
from fairseq.models.wav2vec.wav2vec2 import Wav2Vec2Config, Wav2Vec2Model
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from common.attention import ATTENTIONS
from common.ops.shared.checks import check_positive_int

from ..loading.checkpoint_config import check_texts
from ..loading.checkpoints import CheckedLoading
from ..loading.known_options import option_field
from ..modules.audio_blocks import ExtractorInBlocks, field_and_stride
from ..modules.audio_encoder import FRAMES_OPTION, AudioEncoder, Replace, lengths_to_mask, replaced
from ..modules.multihead_attention import LayerDesign, check_heads, read_padding
from ..modules.not_exportable import NoTorchScript
from ._layers import DesignsLayers
from ._options import PaddingOptions, errors_with_options, option
from ._trained_parameters import TrainedOptions, choose_trained_parameters, train_only_chosen
from ._weight_decay import DecayOptions, MarksDecay, choose_optimizer


@dataclass
class AudioOptions(PaddingOptions, TrainedOptions, DecayOptions):
    """The options that all of our models of audio add to fairseq's."""

    lineartime_max_frames: Optional[int] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None,
        "frames of the longest recording, 50 a second at 16 kHz, for an attention that has parameters or a constant "
        "for each; others take any length",
    )
    lineartime_block_frames: Optional[int] = option_field(  # noqa: UP045
        None,
        "frames whose features are computed at once where no gradient is needed, such as 500: the same features with "
        "less memory, for recordings of many minutes; then results of single layers are not returned",
    )
    lineartime_causal: bool = option_field(
        False,
        "no frame sees one that follows: attention is causal, and positions are those of the frames before; then "
        "AudioStream reads a recording in parts",
    )


@dataclass
class LinearTimeWav2vec2Config(AudioOptions, Wav2Vec2Config):
    """Options of ``wav2vec2`` and ours."""


@dataclass
class LinearTimeHubertConfig(AudioOptions, HubertConfig):
    """Options of ``hubert`` and ours."""


def check_command_line(args: Any) -> None:
    """Apply options of a parsed command line that other options depend on; see ``_trained_parameters``."""
    choose_trained_parameters(args)
    choose_optimizer(args)


class LinearTimeAudioModel(DesignsLayers, NoTorchScript, MarksDecay, CheckedLoading):
    """Mixin before fairseq's ``wav2vec2`` or ``hubert``: the encoder's attention is ours; subclasses name it.

    Raises:
        ValueError: an option has a value that the attention does not allow, or ``--lineartime-max-frames`` is missing.
    """

    def __init__(self, cfg: Any, *of_task: Any) -> None:
        without_layers = copy(cfg)  # fairseq builds its own encoder here, which is replaced below
        without_layers.encoder_layers = 0
        super().__init__(without_layers, *of_task)
        self.cfg = cfg
        block_frames = option(cfg, AudioOptions, "lineartime_block_frames")
        if block_frames is not None:
            check_positive_int("--lineartime-block-frames", block_frames)
            self.feature_extractor = ExtractorInBlocks(self.feature_extractor, block_frames)
        with errors_with_options(type(self), self.option_prefix, "encoder"):
            check_heads(cfg.encoder_attention_heads, {"embed_dim": cfg.encoder_embed_dim})
            for name in ("crop_seq_to_multiple", "required_seq_len_multiple"):
                check_positive_int(name, safe_getattr(cfg, name, 1))
            self.encoder = AudioEncoder(
                cfg,
                self.attention_builder(cfg),
                mask_padding=option(cfg, AudioOptions, "lineartime_mask_padding"),
                long_input=block_frames is not None,
                causal=option(cfg, AudioOptions, "lineartime_causal"),
            )

    @classmethod
    def built(cls, cfg: Any, *of_task: Any) -> nn.Module:
        """The model of the options ``cfg``, with its parameters marked for the optimizer."""
        check_texts(cls, cfg)
        model = cls(cfg, *of_task)
        model.mark_decay(cfg)
        train_only_chosen(model, cfg)
        return model

    @classmethod
    def attention_builder(cls, cfg: Any) -> Replace:
        """A function that builds the attention of the next layer at each call."""
        causal, frames = option(cfg, AudioOptions, "lineartime_causal"), longest(cfg)

        def build(stock: nn.Module, design: LayerDesign) -> nn.Module:
            if frames is None and "max_tokens" in ATTENTIONS[design.attention].needs:
                raise ValueError(
                    f"{FRAMES_OPTION} is not given; allowed with {design.attention} attention, which has parameters or "
                    "a constant for each frame: the frames of the longest recording, 50 a second at 16 kHz"
                )
            return replaced(stock, design, causal)

        return cls.in_turn("encoder", cls.designs(cfg, "encoder", False, frames), build)

    def upgrade_state_dict(self, state_dict: dict[str, Any]) -> None:
        """fairseq's hook: leave out what ``remove_pretraining_modules`` removed, as torch itself does for None."""
        super().upgrade_state_dict(state_dict)
        removed = {name for name, module in self._modules.items() if module is None}
        for name in [name for name in state_dict if name.partition(".")[0] in removed]:
            del state_dict[name]

    def forward(self, source: Tensor, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As fairseq's: source (B, samples).

        Raises:
            ValueError: a recording that is shorter than a frame, beside which fairseq would count padding as real
                frames; fewer frames than ``--crop-seq-to-multiple``, of which none would be left.
        """
        call = signature(super().forward).bind(source, *arguments, **options)
        padding_mask = call.arguments["padding_mask"] = read_padding(call.arguments.get("padding_mask"))
        samples = source.shape[-1] if padding_mask is None else (~padding_mask).sum(-1).min()
        if int(self.frames_of(torch.as_tensor(samples))) < 1:
            raise ValueError(
                f"source has {int(samples)} samples in a recording; allowed: enough for a frame of the extractor; "
                "--min-sample-size leaves recordings out whose length in the manifest is below it"
            )
        multiple = getattr(self, "crop_seq_to_multiple", 1)
        frames = int(self.frames_of(torch.as_tensor(source.shape[-1])))
        if frames < multiple:
            raise ValueError(
                f"source has {source.shape[-1]} samples, which are {frames} frames; allowed with "
                f"--crop-seq-to-multiple {multiple}: at least {multiple} frames; --min-sample-size leaves shorter "
                "recordings out"
            )
        return super().forward(*call.args, **call.kwargs)

    def frames_of(self, samples: Tensor) -> Tensor:
        """The number of frames that the feature extractor makes of ``samples``, without padding."""
        field, stride = field_and_stride(self.feature_extractor.conv_layers)
        return torch.div(samples - field, stride, rounding_mode="floor") + 1

    def remove_pretraining_modules(self, *last_layer: Any, **options: Any) -> None:
        """fairseq's hook before fine-tuning, in which all parameters learn, whatever learned before."""
        super().remove_pretraining_modules(*last_layer, **options)
        self.requires_grad_(True)


class LinearTimeWav2vec2Model(LinearTimeAudioModel, Wav2Vec2Model):
    """fairseq's wav2vec 2.0 with another attention."""

    stock_model = Wav2Vec2Model

    @classmethod
    def build_model(cls, cfg: Any, task: Any = None) -> nn.Module:
        """fairseq's hook."""
        return cls.built(cfg)


class LinearTimeHubertModel(LinearTimeAudioModel, HubertModel):
    """fairseq's HuBERT with another attention."""

    stock_model = HubertModel

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> nn.Module:
        """fairseq's hook; the task has the sample rate and the dictionaries of the targets."""
        return cls.built(cfg, task.cfg, task.dictionaries)

    def forward_padding_mask(self, features: Tensor, padding_mask: Tensor) -> Tensor:
        """fairseq's hook: the mask of frames (B, T) of a mask of samples; padding is on the right.

        fairseq counts a frame as real that reads some padding. With ``--lineartime-mask-padding`` it is padding, as in
        wav2vec 2.0.
        """
        if not option(self.cfg, AudioOptions, "lineartime_mask_padding"):
            return super().forward_padding_mask(features, padding_mask)
        return lengths_to_mask(self.frames_of((~padding_mask).sum(1)), features.shape[1])


def longest(args: Any) -> int | None:
    """The frames of the longest recording, as the encoder pads it; None if the option is not given."""
    frames = option(args, AudioOptions, "lineartime_max_frames")
    if frames is None:
        return None
    check_positive_int(FRAMES_OPTION, frames)
    multiple = safe_getattr(args, "required_seq_len_multiple", 1)  # to which the encoder pads its input
    return -(-frames // multiple) * multiple
