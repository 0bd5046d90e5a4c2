"""``NAME_wav2vec2``, ``NAME_hubert`` and ``NAME_data2vec_audio`` for every attention NAME that is not only causal.

Their ``--NAME-...`` options are the ones that the mechanism declares. ``hybrid_wav2vec2`` and the other hybrids are
stacks of the attentions of ``--lineartime-layers``.
"""

from importlib.util import find_spec

from ._audio import (
    LinearTimeHubertConfig,
    LinearTimeHubertModel,
    LinearTimeWav2vec2Config,
    LinearTimeWav2vec2Model,
    check_command_line,
)
from ._layers import BidirectionalOptions, Hybrid
from ._options import attention_config, camel_case
from ._registration import derive, make_class, make_config, register_checked, register_variant, takes_stock_weights

BASES = {
    "wav2vec2": (LinearTimeWav2vec2Model, LinearTimeWav2vec2Config),
    "hubert": (LinearTimeHubertModel, LinearTimeHubertConfig),
}
# fairseq's packages have its examples; its source tree, installed as it is, does not.
if find_spec("fairseq.examples") and find_spec("fairseq.examples.data2vec"):
    from ._data2vec_audio import LinearTimeData2vecAudioConfig, LinearTimeData2vecAudioModel

    BASES["data2vec_audio"] = (LinearTimeData2vecAudioModel, LinearTimeData2vecAudioConfig)


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
        make_class(__name__, f"{_name}Model", Hybrid, _base, options_class=_options)
    )
