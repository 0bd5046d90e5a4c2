"""``NAME_wav2vec2``, ``NAME_hubert`` and ``NAME_data2vec_audio`` for every attention NAME that is not only causal.

Their ``--NAME-...`` options are the ones that the mechanism declares. ``hybrid_wav2vec2`` and the other hybrids are
stacks of the attentions of ``--lineartime-layers``.
"""

from importlib.util import find_spec
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
from ._options import attention_config, camel_case, option
from ._registration import derive, make_class, make_config, register_checked, register_variant, takes_stock_weights
from .hybrid import BIDIRECTIONAL, BidirectionalOptions, in_turn, kinds_of_layers

BASES = {
    "wav2vec2": (LinearTimeWav2vec2Model, LinearTimeWav2vec2Config),
    "hubert": (LinearTimeHubertModel, LinearTimeHubertConfig),
}
# fairseq's packages have its examples; its source tree, installed as it is, does not.
if find_spec("fairseq.examples") and find_spec("fairseq.examples.data2vec"):
    from ._data2vec_audio import LinearTimeData2vecAudioConfig, LinearTimeData2vecAudioModel

    BASES["data2vec_audio"] = (LinearTimeData2vecAudioModel, LinearTimeData2vecAudioConfig)


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


def _register(prefix: str, attention: str) -> None:
    attributes = {} if takes_stock_weights(attention) else {"stock_model": None}
    for kind, (base, config) in BASES.items():
        options = attention_config(attention)
        register_variant(prefix, kind, attention, base, options, config, check=check_command_line, **attributes)


derive("bidirectional", _register)
for _kind, (_base, _config) in BASES.items():
    _name = f"Hybrid{camel_case(_kind)}"
    _options = make_config(__name__, f"{_name}Config", BidirectionalOptions, _config)
    register_checked(f"hybrid_{_kind}", _options, check_command_line)(
        make_class(__name__, f"{_name}Model", HybridAudioModel, _base)
    )
