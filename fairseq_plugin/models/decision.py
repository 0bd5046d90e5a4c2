"""``NAME_decision`` for every causal attention NAME: Decision Transformers, in the Flowformer paper's size (Table 7).

The names and the ``--NAME-...`` options follow from the declaration of each mechanism.
"""

from argparse import Namespace

from fairseq.models.transformer import TransformerConfig
from torch import nn

from ..modules.transformer_layer import LinearTimeDecoderLayer
from . import decision_baselines  # noqa: F401  registers bc_decision and awac_decision
from ._decision import DecisionConfig, DecisionTransformer
from ._options import attention_config, build_design
from ._registration import derive, register_variant

#: Default options that the authors use for decisions, by mechanism.
_DEFAULTS = {"flow": {"clamp": 10.0}}


class AttentionDecisionTransformer(DecisionTransformer):
    """A Decision Transformer with the mechanism ``attention_name``."""

    attention_name: str

    @classmethod
    def build_layer(cls, args: Namespace, cfg: TransformerConfig) -> nn.Module:
        """One pre-norm layer."""
        design = build_design(args, cls.attention_name, cls.options_class, args.max_target_positions)
        return LinearTimeDecoderLayer(cfg, True, design=design)


def _register(prefix: str, attention: str) -> None:
    options = attention_config(attention, causal=True, **_DEFAULTS.get(attention, {}))
    register_variant(prefix, "decision", attention, AttentionDecisionTransformer, options, DecisionConfig)


derive("causal", _register)
