"""``NAME`` and ``NAME_iwslt_de_en``, ... : an encoder-decoder for every attention NAME that can be an encoder.

They replace fairseq's ``transformer`` and its named sizes, for ``translation`` and similar tasks. Their ``--NAME-...``
options are the ones that the mechanism declares.
"""

from collections.abc import Callable
from functools import partial

from fairseq.models import register_model
from fairseq.models.transformer import (
    base_architecture,
    tiny_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de,
    transformer_wmt_en_de_big,
)

from common.attention import ATTENTIONS

from ._configuration import register_architecture
from ._encoder_decoder import LinearTimeTransformer
from ._options import attention_config, camel_case
from ._registration import derive, make_model, takes_stock_weights
from ._trained_parameters import choose_trained_parameters
from ._weight_decay import choose_optimizer

#: The sizes of fairseq's ``transformer``, by the suffix of their names.
SIZES = {
    "": base_architecture,
    "_tiny": tiny_architecture,
    "_iwslt_de_en": transformer_iwslt_de_en,
    "_wmt_en_de": transformer_wmt_en_de,
    "_wmt_en_de_big": transformer_wmt_en_de_big,
}


def complete(architecture: Callable, args) -> None:
    """Fill in options that the command line left open, as fairseq's ``architecture`` does."""
    architecture(args)
    choose_trained_parameters(args)
    choose_optimizer(args)


def _register(prefix: str, attention: str) -> None:
    options = attention_config(attention, causal="causal" in ATTENTIONS[attention].supports)
    attributes = {} if takes_stock_weights(attention) else {"stock_model": None}
    name = f"{camel_case(prefix)}Transformer"
    register_model(prefix)(make_model(__name__, name, LinearTimeTransformer, attention, options, **attributes))
    for size, architecture in SIZES.items():
        register_architecture(prefix, prefix + size)(partial(complete, architecture))


derive("bidirectional", _register)
