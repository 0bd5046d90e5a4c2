"""All cases by name. A new operation is a row in ``operations``; a registered attention has its case without any."""

from ..harness.work import Case
from . import attentions, gated_attention_unit, images, language_models, operations, prompts, rates, translation

CASES: dict[str, Case] = {
    case.name: case
    for module in (rates, operations, language_models, prompts, translation, images, gated_attention_unit, attentions)
    for case in module.CASES
}
