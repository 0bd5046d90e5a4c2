"""``s2t_NAME`` and ``s2t_conformer_NAME`` for every attention NAME that can be an encoder, and ``s2t_hybrid``.

They replace fairseq's ``s2t_transformer`` with its named sizes, and ``s2t_conformer``, for the task ``speech_to_text``.
Their ``--NAME-...`` options are the ones that the mechanism declares.
"""

from collections.abc import Callable
from functools import partial

from fairseq.models import register_model
from fairseq.models.speech_to_text import s2t_transformer as sizes
from fairseq.models.speech_to_text.s2t_conformer import conformer_base_architecture

from common.attention import ATTENTIONS

from ._configuration import register_architecture
from ._layers import BidirectionalOptions, Hybrid
from ._options import attention_config, camel_case
from ._registration import derive, make_model, takes_stock_weights
from ._speech_to_text import LinearTimeSpeechConformer, LinearTimeSpeechToText
from .encoder_decoder import complete

#: The sizes of fairseq's ``s2t_transformer``, by the suffix of their names.
SIZES: dict[str, Callable] = {
    "": sizes.base_architecture,
    **{f"_{size}": getattr(sizes, f"s2t_transformer_{size}") for size in ("xs", "s", "sp", "m", "mp", "l", "lp")},
}


class HybridSpeechToText(Hybrid, LinearTimeSpeechToText):
    """fairseq's ``s2t_transformer`` whose layers have the attentions of ``--lineartime-layers``."""

    options_class = BidirectionalOptions


class HybridSpeechConformer(Hybrid, LinearTimeSpeechConformer):
    """fairseq's ``s2t_conformer`` whose layers have the attentions of ``--lineartime-layers``."""

    options_class = BidirectionalOptions


def _register(name: str, transformer: type, conformer: type) -> None:
    register_model(f"s2t_{name}")(transformer)
    for size, architecture in SIZES.items():
        register_architecture(f"s2t_{name}", f"s2t_{name}{size}")(partial(complete, architecture))
    register_model(f"s2t_conformer_{name}")(conformer)
    complete_conformer = partial(complete, conformer_base_architecture)
    register_architecture(f"s2t_conformer_{name}", f"s2t_conformer_{name}")(complete_conformer)


def _register_attention(prefix: str, attention: str) -> None:
    options = attention_config(attention, causal="causal" in ATTENTIONS[attention].supports)
    attributes = {} if takes_stock_weights(attention) else {"stock_model": None}
    bases = {"SpeechToText": LinearTimeSpeechToText, "SpeechConformer": LinearTimeSpeechConformer}
    models = [
        make_model(__name__, camel_case(prefix) + words, base, attention, options, **attributes)
        for words, base in bases.items()
    ]
    _register(prefix, *models)


derive("bidirectional", _register_attention)
_register("hybrid", HybridSpeechToText, HybridSpeechConformer)
