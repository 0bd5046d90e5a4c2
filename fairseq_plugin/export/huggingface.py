"""The configuration for transformers of a fairseq model of this plugin, read off its modules and its options."""

from collections.abc import Iterator
from typing import Any

from fairseq.data import Dictionary
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf
from torch import nn

from common.attention import InnerAttention
from common.huggingface import GATED_ATTENTION_UNIT, LineartimeConfig
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.norms import NORMS
from common.modules.relative_bias import RotaryBias, ToeplitzBias

from ..loading.known_options import flag_of
from ..models._classifier import ClassifierOptions
from ..models._options import option
from ..modules.multihead_attention import LayerDesign
from ..modules.positions import LearnedPositions, ScaledSinPositions, SinusoidalPositions

_POSITIONS = {
    type(None): "none",
    LearnedPositions: "learned",
    ScaledSinPositions: "scaled_sinusoidal",
    SinusoidalPositions: "sinusoidal",
}
_BIASES = {type(None): "none", ToeplitzBias: "toeplitz", RotaryBias: "rotary"}
#: Attributes of a gated attention unit that are arguments of its constructor, besides sizes and dropout.
_UNIT_OPTIONS = (
    "query_dim chunk_size max_positions divisor kernel gate local linear overlap chunk_summaries rotary first_softmax "
    "first_to_all"
).split()
#: Options of fairseq whose parts have no counterpart.
_WITHOUT_COUNTERPART = (
    "adaptive_input adaptive_softmax_cutoff character_embeddings cross_self_attention no_cross_attention base_layers "
    "scale_attn scale_fc scale_heads scale_resids decoder_layers_to_keep encoder_layers_to_keep"
).split()


def configuration_of(model: nn.Module, cfg: Any, dictionary: Dictionary) -> LineartimeConfig:
    """The configuration of ``model``, a language model, masked model, classifier or encoder-decoder of this plugin.

    ``cfg`` has fairseq's options of the model: the group ``model`` of a checkpoint, or a parsed command line.
    ``dictionary`` is that of its tokens, of an encoder-decoder that of the target.

    Raises:
        ValueError: an option with a part that has no counterpart, such as an adaptive softmax.
    """
    cfg = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True) if OmegaConf.is_config(cfg) else vars(cfg)
    for name in _WITHOUT_COUNTERPART:
        if cfg.get(name):
            raise ValueError(f"{flag_of(name)} is {cfg[name]}; allowed for transformers: not given")
    encoder, decoder = getattr(model, "encoder", None), getattr(model, "decoder", None)
    encoder = getattr(encoder, "sentence_encoder", encoder)
    side = encoder if decoder is None else decoder
    fields = {
        **_side(side),
        **_blocks(side),
        "architecture": cfg.get("_name") or cfg.get("arch"),
        "is_decoder": encoder is None,
        "reset_at_eos": side.documents.resets,
        "bos_token_id": dictionary.bos(),
        "pad_token_id": dictionary.pad(),
        "eos_token_id": dictionary.eos(),
    }
    if decoder is None:
        fields |= _of_masked(model)
    elif encoder is None:
        fields["bos_token_id"] = dictionary.bos() if cfg.get("add_bos_token") else dictionary.eos()
    else:
        fields |= {f"encoder_{name}": value for name, value in _side(encoder).items()}
        fields["cross_attention"] = [_cross_entry(layer) for layer in decoder.layers.children()]
        fields["tie_encoder_embeddings"] = encoder.embed_tokens is decoder.embed_tokens
        fields |= {"is_encoder_decoder": True, "decoder_start_token_id": dictionary.eos()}
    modules = [x for part in (encoder, decoder) if part is not None for x in part.modules()]
    own = [x for x in modules if isinstance(x, InnerAttention) and x.stored_module() is not None]
    fields["own_modules"] = {x.name: x.stored_module() for x in own}
    if decoder is not None:
        fields["tie_word_embeddings"] = decoder.output_projection.weight is decoder.embed_tokens.weight
    return LineartimeConfig(**fields)


def _side(side: nn.Module) -> dict[str, Any]:
    """The fields of an encoder or a decoder."""
    layers = list(side.layers.children())  # with layer drop, iterating over the list itself skips layers at random
    first, table = layers[0], side.embed_tokens.weight
    into = getattr(side, "project_in_dim", None)  # of a decoder whose layers have another width than its embeddings
    unit = getattr(first, "unit", None)
    longest = side.max_target_positions if hasattr(side, "max_target_positions") else side.max_source_positions
    return {
        "attention": [_entry(layer) for layer in layers],
        "vocab_size": len(table),
        "hidden_size": table.shape[1] if into is None else into.out_features,
        "num_attention_heads": first.self_attn.num_heads if unit is None else unit.heads,
        "intermediate_size": first.fc2.in_features if unit is None else unit.expanded_dim,
        "normalize_before": unit is not None or first.normalize_before,
        "final_norm": side.layer_norm is not None,
        "positions": _POSITIONS[type(side.embed_positions)],
        "max_position_embeddings": longest,
    }


def _blocks(side: nn.Module) -> dict[str, Any]:
    """The fields that all layers share, and those of embeddings."""
    first, host = next(side.layers.children()), side.cfg
    unit = getattr(first, "unit", None)
    design = LayerDesign("none") if unit is not None else first.design
    norm = _norm_name(unit.norm if unit is not None else first.final_layer_norm)
    norms = [x for x in side.modules() if isinstance(x, nn.LayerNorm)]
    into, out = (getattr(side, f"project_{end}_dim", None) for end in ("in", "out"))
    return {
        "embedding_dim": None if into is None else into.in_features,
        "output_dim": None if out is None else out.out_features,
        "family": "transformer" if unit is None else "gau",
        "hidden_act": str(getattr(host.activation_fn, "value", host.activation_fn)),
        "norm": norm,
        **({"layer_norm_eps": norms[0].eps} if norms else {}),
        "scale_embedding": side.embed_scale != 1.0,
        "layernorm_embedding": side.layernorm_embedding is not None,
        "gated_ffn": design.gated_ffn,
        "attention_gate": design.attention_gate,
        "attention_dim": design.attention_dim,
        "projection_bias": design.projection_bias,
        "hidden_dropout": float(host.dropout),
        "attention_dropout": float(host.attention_dropout),
        "activation_dropout": float(host.activation_dropout or host.relu_dropout or 0.0),
    }


def _norm_name(norm: nn.Module) -> str:
    return next((name for name, kind in NORMS.items() if isinstance(norm, kind)), "layernorm")


def _entry(layer: nn.Module) -> dict[str, Any]:
    """The attention of a layer."""
    if hasattr(layer, "unit"):
        return {"kind": GATED_ATTENTION_UNIT, "options": _unit_options(layer.unit)}
    design = layer.design
    longest = {} if design.max_tokens is None else {"max_tokens": design.max_tokens}
    return {"kind": design.attention, "options": dict(design.options), "rotary": design.rotary, **longest}


def _unit_options(unit: GatedAttentionUnit) -> dict[str, Any]:
    options = {name: getattr(unit, name) for name in _UNIT_OPTIONS}
    return {
        **options,
        "separate_ffn": unit.ffn is not None,
        "forget": "none" if unit.forget_gate is None else unit.forget_gate.forget,
        "bias": _BIASES[type(unit.bias)],
        "norm": _norm_name(unit.norm),
    }


def _cross_entry(layer: nn.Module) -> dict[str, Any]:
    """The attention of a decoder layer to the encoder."""
    if layer.cross is None:
        return {"kind": "softmax"}
    longest = {} if layer.cross.max_tokens is None else {"max_tokens": layer.cross.max_tokens}
    return {"kind": layer.cross.attention, "options": dict(layer.cross.options), **longest}


def _of_masked(model: nn.Module) -> dict[str, Any]:
    """The fields of a masked model or of a classifier."""
    fields: dict[str, Any] = {"bos_token_id": 0}
    lm_head = getattr(model.encoder, "lm_head", None)
    if lm_head is not None:
        fields["tie_word_embeddings"] = lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight
    heads = list(_heads(model))
    if lm_head is not None and heads:
        names = ", ".join(name for name, _ in heads)
        raise ValueError(f"the model has a language-model head and the head {names}; allowed for transformers: one")
    if lm_head is not None:
        return fields
    if len(heads) != 1 or getattr(model, "sequences", 1) != 1:
        what = "two sequences" if len(heads) == 1 else f"{len(heads)} heads"
        raise ValueError(f"the classifier is for {what}; allowed for transformers: one head, for one sequence")
    (name, head), args = heads[0], model.args
    fields |= {
        "pooling": option(args, ClassifierOptions, "pooling"),
        "classifier_style": option(args, ClassifierOptions, "classifier_style"),
        "classifier_head": name,
        "classifier_dim": head.dense.out_features,
        "classifier_act": safe_getattr(args, "pooler_activation_fn", "tanh"),
        "classifier_dropout": float(safe_getattr(args, "pooler_dropout", 0.0)),
        "num_labels": head.out_proj.out_features,
    }
    labels = model.labels or []
    if len(labels) >= head.out_proj.out_features:
        fields["id2label"] = dict(enumerate(labels[: head.out_proj.out_features]))
        fields["label2id"] = {label: i for i, label in fields["id2label"].items()}
    return fields


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return iter(getattr(model, "classification_heads", {}).items())
