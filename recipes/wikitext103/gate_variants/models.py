"""linear_lm and flowformer_lm with gates that are held as they are at first, or that are learned but read no token."""

from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model

from common.modules.forget_gate import ForgetGate
from fairseq_plugin.models.flowformer import (
    FlowformerLanguageModel,
    FlowformerLanguageModelConfig,
    LinearLanguageModel,
    LinearLanguageModelConfig,
)
from recipes.shared.additions import GATES


def _with_gates(config: type) -> type:
    """``config`` with the option ``--gates``."""

    @dataclass
    class GateVariantConfig(config):
        # What of a gate sigmoid(W x + b) is trained: nothing, or b alone.
        gates: ChoiceEnum(GATES) = field(
            default="fixed",
            metadata={"help": "the gates: fixed, as they are at first; learned, the same for all tokens"},
        )

    return GateVariantConfig


class _GateVariant:
    """In front of a language model: its gates are a number for each head, W being 0."""

    @classmethod
    def build_model(cls, args, task):
        """See fairseq."""
        model = super().build_model(args, task)
        for gate in model.modules():
            if isinstance(gate, ForgetGate):
                gate.gate_proj.weight.requires_grad_(False)  # which is 0 at first
                gate.gate_proj.bias.requires_grad_(args.gates == "learned")
        return model


@register_model("linear_gate_variant", dataclass=_with_gates(LinearLanguageModelConfig))
class LinearGateVariant(_GateVariant, LinearLanguageModel):
    """``linear_lm`` with ``--linear-forget head`` and ``--gates``."""


@register_model("flow_gate_variant", dataclass=_with_gates(FlowformerLanguageModelConfig))
class FlowGateVariant(_GateVariant, FlowformerLanguageModel):
    """``flowformer_lm`` with ``--flow-forget head`` and ``--gates``."""
