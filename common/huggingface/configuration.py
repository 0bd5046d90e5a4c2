"""The configuration of a model for transformers: plain data from which every module of it can be built."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from .. import __version__
from .._installed import version_numbers
from ..attention import ATTENTIONS, how_to_import
from ..ops.shared.checks import (
    allowed_names,
    check_choice,
    check_positive_int,
    check_probability,
    check_table,
    shortened,
)

#: The kind of a layer that is a gated attention unit; every other kind is a name of ``common.attention.ATTENTIONS``.
GATED_ATTENTION_UNIT = "gated_attention_unit"
FAMILIES = ("transformer", "gau")
#: How positions are added to token embeddings; rotary positions belong to each layer's attention.
POSITIONS = ("sinusoidal", "scaled_sinusoidal", "learned", "none")
POOLINGS = ("first", "last", "mean")
CLASSIFIER_STYLES = ("roberta", "arena")

#: The fields of one side, an encoder or a decoder, and their defaults. An encoder-decoder has those of its decoder
#: under these names, and those of its encoder as ``encoder_NAME``.
_SIDE: dict[str, Any] = {
    "attention": None,
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "normalize_before": True,
    "final_norm": True,
    "positions": "sinusoidal",
    "max_position_embeddings": 1024,
}
#: The other fields, and their defaults.
_FIELDS: dict[str, Any] = {
    "family": "transformer",
    "architecture": None,
    "is_decoder": False,
    "embedding_dim": None,
    "output_dim": None,
    "hidden_act": "relu",
    "norm": "layernorm",
    "layer_norm_eps": 1e-5,
    "scale_embedding": True,
    "layernorm_embedding": False,
    "gated_ffn": False,
    "attention_gate": False,
    "attention_dim": None,
    "projection_bias": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "reset_at_eos": False,
    "cross_attention": None,
    "tie_encoder_embeddings": False,
    "pooling": None,
    "classifier_style": "roberta",
    "classifier_head": "sentence_classification_head",
    "classifier_dim": None,
    "classifier_act": "tanh",
    "classifier_dropout": 0.0,
    "own_modules": {},
    "lineartime_version": __version__,
}
#: Fields of transformers' own, and our defaults: the special tokens of fairseq's dictionaries.
_HOST: dict[str, Any] = {
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": None,
}


class LayerAttention(NamedTuple):
    """The attention of one layer."""

    kind: str  # a name of ``ATTENTIONS``, or "gated_attention_unit"
    options: dict[str, Any] = {}  # of ``build_attention`` or ``GatedAttentionUnit``
    rotary: bool = False  # rotary positions of queries and keys
    max_tokens: int | None = None  # of the longest sequence, for kinds that need it


@dataclass(frozen=True)
class Side:
    """The sizes of an encoder or a decoder; fields as in ``LineartimeConfig``."""

    attention: tuple[LayerAttention, ...]
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    normalize_before: bool
    final_norm: bool
    positions: str
    max_position_embeddings: int


class LineartimeConfig(PretrainedConfig):
    """The configuration of a language model, masked model, classifier or encoder-decoder of lineartime.

    All fields are plain data, with the values that the layers of the fairseq model have.

    Args:
        family: "transformer", or "gau" for stacks of gated attention units such as FLASH.
        architecture: name of fairseq's model, for people.
        is_decoder: the layers are causal, those of a language model, which sets it itself.
        attention: one entry per layer, ``{"kind": ..., "options": {...}, "rotary": ..., "max_tokens": ...}``, of which
            only the kind is required; see ``LayerAttention``. For "gated_attention_unit" the options are those of
            ``GatedAttentionUnit`` except widths, heads, causality and dropout.
        vocab_size, hidden_size, num_attention_heads, intermediate_size: sizes; the last is the width inside of the
            feed-forward block or, in a gated attention unit, of U and V.
        embedding_dim, output_dim: channels of a decoder's token embeddings, which are projected to ``hidden_size``, and
            of what its features are projected to before the output projection. None: ``hidden_size``, not projected.
        normalize_before, final_norm: norms before blocks instead of after them, and one after the last layer.
        positions: how positions are embedded: sinusoidal, scaled_sinusoidal (FLASH), learned or none.
        max_position_embeddings: the longest sequence, not counting padding. Only learned positions and attentions with
            parameters per position refuse longer ones.
        hidden_act: activation inside of feed-forward blocks, by fairseq's name.
        norm, layer_norm_eps: "layernorm" or "scalenorm", and what each LayerNorm of an encoder adds to the variance.
        scale_embedding: multiply token embeddings by the square root of their width.
        layernorm_embedding: LayerNorm of the sum of embeddings.
        gated_ffn, attention_gate: GLU in feed-forward blocks; a SiLU gate on the output of attention (FLASH).
        attention_dim, projection_bias: channels of all heads together, None for the width; biases of projections.
        hidden_dropout, attention_dropout, activation_dropout: fairseq's dropout, attention and activation dropout.
        reset_at_eos: each eos ends a document, and no document sees another.
        encoder_attention, encoder_vocab_size, ...: the same fields of the encoder of an encoder-decoder.
        cross_attention: one entry per decoder layer of an encoder-decoder, as in ``attention``.
        tie_word_embeddings: the output projection has the weights of the token embeddings.
        tie_encoder_embeddings: an encoder-decoder has one table of embeddings, with ``tie_word_embeddings``.
        pooling, classifier_style, classifier_head, classifier_dim, classifier_act, classifier_dropout: of a classifier:
            its pooling of features (first, mean; last, mean with ``is_decoder``; None: the first of them), the style
            of its head (roberta, arena), its name, the width inside (None: ``hidden_size``, or in style arena
            ``intermediate_size``), activation and dropout.
        own_modules: the module of each attention that is a user's own, which must be imported first.
        lineartime_version: of the package that wrote the configuration.
        further: transformers' own fields.

    Raises:
        ValueError: a field has a value that is not allowed, or the configuration is of a newer lineartime.
    """

    model_type = "lineartime"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(self, **fields: Any) -> None:
        for name, default in _FIELDS.items():
            setattr(self, name, fields.pop(name, default))
        for name, default in _SIDE.items():
            setattr(self, name, fields.pop(name, default))
            if f"encoder_{name}" in fields:
                setattr(self, f"encoder_{name}", fields.pop(f"encoder_{name}"))
        check_positive_int("vocab_size", self.vocab_size)  # before transformers compares token ids with it
        for name in ("attention", "encoder_attention", "cross_attention"):
            if hasattr(self, name):
                setattr(self, name, _plain_entries(getattr(self, name)))
        fields.pop("num_hidden_layers", None)  # for readers of config.json: ``attention`` has one entry per layer
        self.num_hidden_layers = len(self.attention or ())
        if fields.get("num_labels") is not None:  # transformers makes a name for each
            check_positive_int("num_labels", fields["num_labels"])
            check_table("num_labels", fields["num_labels"], (fields["num_labels"], 2**10))
        super().__init__(**{**_HOST, **fields})
        if "LineartimeForCausalLM" in (self.architectures or ()):  # folders of earlier versions do not say is_decoder
            self.is_decoder = True
        if self.is_encoder_decoder and self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.eos_token_id  # as in fairseq
        self._check()

    def side(self, encoder: bool = False) -> Side:
        """The sizes of the only stack of layers, or of the decoder; with ``encoder`` of an encoder-decoder's encoder.

        Raises:
            ValueError: ``attention`` is missing, or a size is not allowed.
        """
        prefix = "encoder_" if encoder else ""
        values = self._check_side(prefix)
        values["attention"] = self.layers(f"{prefix}attention")
        return Side(**values)

    def _check_side(self, prefix: str) -> dict[str, Any]:
        """The fields of a side, by their names without ``prefix``; ValueError for one that is not allowed."""
        values = {name: getattr(self, prefix + name, None) for name in _SIDE}
        for name, default in _SIDE.items():
            if type(default) is int:
                check_positive_int(prefix + name, values[name])
        for name in ("attention_dim", "classifier_dim", "embedding_dim", "output_dim"):
            channels = getattr(self, name)
            if channels is not None:
                check_positive_int(name, channels)
                check_table(name, channels, (channels, max(values["hidden_size"], values["vocab_size"])))
        check_choice(f"{prefix}positions", values["positions"], POSITIONS)
        width, heads = self.attention_dim or values["hidden_size"], values["num_attention_heads"]
        if self.family == "transformer" and width % heads:
            of = "attention_dim" if self.attention_dim else f"{prefix}hidden_size"
            raise ValueError(f"{prefix}num_attention_heads is {heads}; allowed: a divisor of {of}, {width}")
        for name in ("hidden_size", "vocab_size", "intermediate_size"):
            check_table(f"{prefix}{name}", values[name], (values[name], values["hidden_size"]))
        if values["positions"] == "learned":
            longest = values["max_position_embeddings"]
            check_table(f"{prefix}max_position_embeddings", longest, (longest, values["hidden_size"]))
        self._check_token("pad_token_id", "the positions of a model are counted from it", f"{prefix}vocab_size")
        return values

    def _check_token(self, name: str, reason: str, size: str = "vocab_size") -> None:
        """Raise ValueError unless the field ``name`` is one token of the vocabulary, which ``reason`` asks for."""
        token, tokens = getattr(self, name), getattr(self, size)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < tokens:
            raise ValueError(f"{name} is {token!r}; allowed: one token, below {size}, {tokens}, as {reason}")

    def layers(self, name: str) -> tuple[LayerAttention, ...]:
        """The entries of the field ``name``, which is attention, encoder_attention or cross_attention.

        Raises:
            ValueError: there are none, or one is not allowed.
        """
        entries = getattr(self, name, None)
        if not entries:
            raise ValueError(f"{name} is {entries}; allowed: a list with one entry per layer")
        return tuple(_read_entry(name, index, entry, self.own_modules) for index, entry in enumerate(entries))

    def _check(self) -> None:
        """Raise ValueError unless the fields other than sizes are allowed."""
        if version_numbers(str(self.lineartime_version))[:2] > version_numbers(__version__)[:2]:
            raise ValueError(
                f"lineartime_version is {self.lineartime_version}; allowed: at most the installed {__version__}: a "
                "newer lineartime wrote this configuration"
            )
        check_choice("family", self.family, FAMILIES)
        for prefix in ("", *(["encoder_"] if hasattr(self, "encoder_attention") else [])):
            self._check_side(prefix)
        for name in ("hidden_dropout", "attention_dropout", "activation_dropout", "classifier_dropout"):
            check_probability(name, getattr(self, name))
        eps = self.layer_norm_eps
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0.0 <= eps < math.inf:
            raise ValueError(f"layer_norm_eps is {eps!r}; allowed: a number of at least 0")
        if self.reset_at_eos:
            self._check_token("eos_token_id", "reset_at_eos is True")
        if self.is_encoder_decoder:
            self._check_token("decoder_start_token_id", "targets begin with it (None: with eos_token_id)")
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        check_choice("classifier_style", self.classifier_style, CLASSIFIER_STYLES)
        kinds = {entry.kind for entry in (self.layers("attention") if self.attention else ())}
        is_unit = {kind == GATED_ATTENTION_UNIT for kind in kinds}
        if len(is_unit) == 2 or (is_unit and is_unit != {self.family == "gau"}):
            allowed = GATED_ATTENTION_UNIT if self.family == "gau" else f"any but {GATED_ATTENTION_UNIT}"
            listed = ", ".join(sorted(kinds))
            raise ValueError(f"attention has layers of {listed}; allowed in family {self.family}: {allowed}")


def _read_entry(name: str, index: int, entry: Any, own_modules: Any) -> LayerAttention:
    place = f"{name}[{index}]"
    if not isinstance(entry, Mapping) or "kind" not in entry:
        raise ValueError(f"{place} is {entry!r}; allowed: a dictionary with kind, options, rotary and max_tokens")
    for key in entry:
        if key not in LayerAttention._fields:
            raise ValueError(f"{place} has {key!r}; {allowed_names(key, LayerAttention._fields)}")
    kinds = (*ATTENTIONS, GATED_ATTENTION_UNIT)
    if entry["kind"] not in kinds and isinstance(own_modules, Mapping) and entry["kind"] in own_modules:
        module = shortened(own_modules[entry["kind"]]).strip("'")
        raise ValueError(f"{place} is of kind {entry['kind']!r}; {how_to_import(module)}")
    if entry["kind"] not in kinds:
        raise ValueError(f"{place} is of kind {entry['kind']!r}; {allowed_names(str(entry['kind']), kinds)}")
    if not isinstance(entry.get("options", {}), Mapping):
        raise ValueError(f"{place} has the options {entry['options']!r}; allowed: a dictionary")
    return LayerAttention(**entry)


def _plain_entries(entries: Any) -> Any:
    """``entries`` as JSON has them: infinity, which it lacks, is a text that every option of a number reads."""
    if not isinstance(entries, (list, tuple)):
        return entries
    return [
        {**entry, "options": {name: _plain(x) for name, x in entry.get("options", {}).items()}}
        if isinstance(entry, Mapping) and isinstance(entry.get("options", {}), Mapping)
        else entry
        for entry in entries
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return list(value) if isinstance(value, tuple) else value
