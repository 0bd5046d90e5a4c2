"""A --user-dir for fairseq: linear_lm and flowformer_lm with --gates, whose gates do not depend on the token.

They keep their initial value, or are learned but the same for all tokens.
"""

from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model

import fairseq_plugin  # noqa: F401  registers the architectures
from common.modules.forget_gate import ForgetGate
from fairseq_plugin.models.flowformer import (
    FlowformerLanguageModel,
    FlowformerLanguageModelConfig,
    LinearLanguageModel,
    LinearLanguageModelConfig,
)


def _with_gates(config: type) -> type:
    """``config`` with the option ``--gates``."""

    @dataclass
    class GateVariantConfig(config):
        # The trained part of a gate sigmoid(W x + b): nothing, or only b.
        gates: ChoiceEnum(("fixed", "learned")) = field(
            default="fixed",
            metadata={"help": "the gates: fixed, as they are at first; learned, the same for all tokens"},
        )

    return GateVariantConfig


class _GateVariant:
    """Mixin for language models: each head has one gate value for all tokens, since W stays 0."""

    @classmethod
    def build_model(cls, args, task):
        """See fairseq."""
        model = super().build_model(args, task)
        for gate in model.modules():
            if isinstance(gate, ForgetGate):
                gate.gate_proj.weight.requires_grad_(False)  # initialised to 0
                gate.gate_proj.bias.requires_grad_(args.gates == "learned")
        return model


@register_model("linear_gate_variant", dataclass=_with_gates(LinearLanguageModelConfig))
class LinearGateVariant(_GateVariant, LinearLanguageModel):
    """``linear_lm`` with ``--linear-forget head`` and ``--gates``."""


@register_model("flow_gate_variant", dataclass=_with_gates(FlowformerLanguageModelConfig))
class FlowGateVariant(_GateVariant, FlowformerLanguageModel):
    """``flowformer_lm`` with ``--flow-forget head`` and ``--gates``."""
