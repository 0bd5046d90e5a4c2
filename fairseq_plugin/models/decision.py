"""``NAME_decision`` for every causal attention NAME: Decision Transformers, in the Flowformer paper's size (Table 7).

The names and the ``--NAME-...`` options follow from what each mechanism declares.
"""

from argparse import Namespace
from dataclasses import dataclass

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig
from torch import nn

from common.attention import ATTENTIONS

from ..modules.transformer_layer import LinearTimeDecoderLayer
from ._decision import DecisionConfig, DecisionTransformer
from ._options import attention_config, camel_case
from .attention import FURTHER_NAMES, build_design

#: Defaults of a mechanism's options that are the authors' for decisions.
_DEFAULTS = {"flow": {"clamp": 10.0}}


class AttentionDecisionTransformer(DecisionTransformer):
    """A Decision Transformer over the mechanism ``attention_name``."""

    attention_name: str

    @classmethod
    def build_layer(cls, args: Namespace, cfg: TransformerConfig) -> nn.Module:
        """One pre-norm layer."""
        design = build_design(args, cls.attention_name, cls.config, args.max_target_positions)
        return LinearTimeDecoderLayer(cfg, True, design=design)


def _register(prefix: str, attention: str) -> None:
    """Register ``prefix``_decision; this file holds its classes under their names, so that pickle finds them."""
    options = attention_config(attention, causal=True, **_DEFAULTS.get(attention, {}))
    name = f"{camel_case(prefix)}Decision"
    held = {"__module__": __name__}
    config = dataclass(type(f"{name}Config", (options, DecisionConfig), held))
    attributes = {**held, "__doc__": AttentionDecisionTransformer.__doc__}
    attributes |= {"attention_name": attention, "option_prefix": attention, "config": config}
    model = type(f"{name}Transformer", (AttentionDecisionTransformer,), attributes)
    globals().update({config.__name__: config, model.__name__: model})
    register_model(f"{prefix}_decision", dataclass=config)(model)


for _attention in ATTENTIONS:
    if "causal" in ATTENTIONS[_attention].supports:
        for _prefix in (_attention, *FURTHER_NAMES.get(_attention, ())):
            _register(_prefix, _attention)
