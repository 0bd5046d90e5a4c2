"""All cases by name. A new operation is a row in ``operations``; a registered attention needs no edit."""

from ..harness.work import Case
from . import (
    attention_steps,
    attentions,
    audio,
    forgetting,
    gated_attention_unit,
    images,
    language_models,
    operations,
    prompts,
    rates,
    short_inputs,
    translation,
)

_FAIRSEQ = (language_models, forgetting, prompts, translation, audio)
_MODULES = (rates, operations, short_inputs, *_FAIRSEQ, images, gated_attention_unit, attentions, attention_steps)
CASES: dict[str, Case] = {case.name: case for module in _MODULES for case in module.CASES}
