"""``NAME_decision`` for every causal attention NAME: Decision Transformers, in the Flowformer paper's size (Table 7).

The names and the ``--NAME-...`` options follow from the declaration of each mechanism.
"""

from . import decision_baselines  # noqa: F401  registers bc_decision and awac_decision
from ._decision import DecisionConfig, DecisionTransformer
from ._options import attention_config
from ._registration import derive, register_variant

#: Default options that the authors use for decisions, by mechanism.
_DEFAULTS = {"flow": {"clamp": 10.0}}


def _register(prefix: str, attention: str) -> None:
    options = attention_config(attention, causal=True, **_DEFAULTS.get(attention, {}))
    register_variant(prefix, "decision", attention, DecisionTransformer, options, DecisionConfig)


derive("causal", _register)
