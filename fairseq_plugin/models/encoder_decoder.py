"""``NAME`` and ``NAME_iwslt_de_en``, ... : an encoder-decoder for every attention NAME that can be an encoder.

They take the place of fairseq's ``transformer`` and of its named sizes, for ``translation`` and every task like it. All
follows from the mechanism's declaration: its ``--NAME-...`` options are the ones it declares.
"""

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    base_architecture,
    tiny_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de,
    transformer_wmt_en_de_big,
)

from common.attention import ATTENTIONS, build_attention, supporting

from ._encoder_decoder import LinearTimeTransformer
from ._options import attention_config, camel_case
from .attention import FURTHER_NAMES

#: The sizes of fairseq's ``transformer``, by what their names add to it.
SIZES = {
    "": base_architecture,
    "_tiny": tiny_architecture,
    "_iwslt_de_en": transformer_iwslt_de_en,
    "_wmt_en_de": transformer_wmt_en_de,
    "_wmt_en_de_big": transformer_wmt_en_de_big,
}


def _has_stock_weights(attention: str) -> bool:
    """Whether a layer with ``attention`` has the weights of fairseq's own, no more and no others."""
    kind, shape = ATTENTIONS[attention], {"num_heads": 1, "head_dim": 8, "max_tokens": 8}
    modules = [build_attention(attention, x, **shape) for x in (False, True) if not x or "causal" in kind.supports]
    return all(not (*x.parameters(), *x.buffers()) and x.projections(8) == {"q": 8, "k": 8, "v": 8} for x in modules)


def _register(prefix: str, attention: str) -> None:
    name = f"{camel_case(prefix)}Transformer"
    attributes = {
        "attention_name": attention,
        "option_prefix": attention,
        "options_class": attention_config(attention, causal="causal" in ATTENTIONS[attention].supports),
    }
    if not _has_stock_weights(attention):
        attributes["stock_model"] = None
    held = {"__module__": __name__, "__doc__": LinearTimeTransformer.__doc__}
    model = type(name, (LinearTimeTransformer,), {**held, **attributes})
    globals()[name] = register_model(prefix)(model)  # under its name, so that pickle finds it
    for size, architecture in SIZES.items():
        register_model_architecture(prefix, prefix + size)(architecture)


for _attention in ATTENTIONS:
    if _attention in supporting("bidirectional"):
        for _prefix in (_attention, *FURTHER_NAMES.get(_attention, ())):
            _register(_prefix, _attention)
