"""``NAME_wav2vec2`` and ``NAME_hubert`` for every attention NAME that is not causal, and stacks of several kinds.

Their ``--NAME-...`` options are the ones that the mechanism declares. ``hybrid_wav2vec2`` and ``hybrid_hubert`` have
the attentions of ``--lineartime-layers``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq.modules import MultiheadAttention

from ..modules.audio_encoder import Replace, replaced
from ..modules.multihead_attention import InnerMultiheadAttention
from ._audio import (
    AudioOptions,
    LinearTimeAudioModel,
    LinearTimeHubertConfig,
    LinearTimeHubertModel,
    LinearTimeWav2vec2Config,
    LinearTimeWav2vec2Model,
    audio_design,
    check_command_line,
)
from ._options import attention_config, option
from ._registration import derived, register_checked, register_variant, takes_stock_weights
from .hybrid import BIDIRECTIONAL, BidirectionalOptions, in_turn, kinds_of_layers

BASES = {
    "wav2vec2": (LinearTimeWav2vec2Model, LinearTimeWav2vec2Config),
    "hubert": (LinearTimeHubertModel, LinearTimeHubertConfig),
}


class HybridAudioModel(LinearTimeAudioModel):
    """Mixin before one of our models of audio: its layers have the attentions of ``--lineartime-layers``."""

    option_prefix = "lineartime"

    @classmethod
    def attention_builder(cls, cfg: Any) -> Replace:
        """A function that builds the attention of the next layer at each call."""

        def build(kind: str, stock: MultiheadAttention) -> InnerMultiheadAttention:
            causal = option(cfg, AudioOptions, "lineartime_causal")
            return replaced(audio_design(cfg, kind, BIDIRECTIONAL[kind]), stock, causal)

        return in_turn(cls, "encoder", kinds_of_layers(cls, cfg, "encoder", BIDIRECTIONAL), build)


@dataclass
class HybridWav2vec2Config(BidirectionalOptions, LinearTimeWav2vec2Config):
    """Options of ``hybrid_wav2vec2``."""


@dataclass
class HybridHubertConfig(BidirectionalOptions, LinearTimeHubertConfig):
    """Options of ``hybrid_hubert``."""


class HybridWav2vec2Model(HybridAudioModel, LinearTimeWav2vec2Model):
    """wav2vec 2.0 whose layers have the attentions of ``--lineartime-layers``."""


class HybridHubertModel(HybridAudioModel, LinearTimeHubertModel):
    """HuBERT whose layers have the attentions of ``--lineartime-layers``."""


for _prefix, _attention in derived("bidirectional"):
    _attributes = {} if takes_stock_weights(_attention) else {"stock_model": None}
    for _kind, (_base, _config) in BASES.items():
        _options = attention_config(_attention)
        register_variant(_prefix, _kind, _attention, _base, _options, _config, check=check_command_line, **_attributes)
_register = partial(register_checked, check=check_command_line)
_register("hybrid_wav2vec2", HybridWav2vec2Config)(HybridWav2vec2Model)
_register("hybrid_hubert", HybridHubertConfig)(HybridHubertModel)
