"""A tiny model of each of transformers' classes."""

from typing import Any

from torch import nn

from common.attention import ATTENTIONS
from common.huggingface import GATED_ATTENTION_UNIT, LineartimeConfig, LineartimeForCausalLM, LineartimeForSeq2SeqLM

SIZES = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 48}
SIDE = {**SIZES, "normalize_before": True, "final_norm": True, "max_position_embeddings": 64}


def fields_of(kind: type[nn.Module], layers: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The fields of a configuration for ``kind`` with ``layers`` for each side that can have them."""
    causal = [layer for layer in layers if _supports(layer, "causal")]
    bidirectional = [layer for layer in layers if _supports(layer, "bidirectional")]
    decodes = fields.get("is_decoder") or kind in (LineartimeForCausalLM, LineartimeForSeq2SeqLM)
    fields = {**SIDE, "attention": causal if decodes else bidirectional, **fields}
    if kind is LineartimeForSeq2SeqLM:
        sums = [layer for layer in layers if _supports(layer, "source") and "rotary" not in layer] or [
            {"kind": "softmax"}
        ]
        fields |= {f"encoder_{name}": fields.get(name, "sinusoidal") for name in (*SIDE, "positions")}
        fields |= {"encoder_attention": bidirectional, "is_encoder_decoder": True}
        fields["cross_attention"] = [sums[i % len(sums)] for i in range(len(causal))]
    return fields


def _supports(layer: dict[str, Any], what: str) -> bool:
    if layer["kind"] == GATED_ATTENTION_UNIT:
        return what != "source" and not (what == "bidirectional" and layer["options"].get("forget"))
    only_causal = layer.get("options", {}).keys() & {"forget"}
    return what in ATTENTIONS[layer["kind"]].supports and not (only_causal and what != "causal")


def small(kind: type[nn.Module], **fields: Any) -> nn.Module:
    """A model with two layers."""
    return kind(
        LineartimeConfig(**fields_of(kind, [{"kind": "flow"}, {"kind": "bigbird"}, {"kind": "favor"}], **fields))
    )
