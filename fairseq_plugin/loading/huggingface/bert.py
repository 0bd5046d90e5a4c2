"""BERT and RoBERTa as fairseq's ``roberta``: post-norm layers, learned positions, a head of its own.

The embedding of the first token type, which every token of a single text has, is added to the positions; others are
left out. So are poolers and the heads of classifiers: fairseq's models have others.

Legend: V symbols, P positions, D width.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.files import json_files

from .folder import ALLOWED, check_entries, check_table, read_tensors, without_prefix
from .foreign_model import ForeignModel
from .vocabularies import Vocabulary, bert_vocabulary, roberta_vocabulary

#: What config.json must say where it says anything, for both.
_FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
_FIXED |= {"pruned_heads": {}, "tie_word_embeddings": True}
#: Activations of the layers, which BERT's head has too, in fairseq's words. The head of RoBERTa always has gelu.
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate", "relu": "relu"}
_ENCODER, _HEAD = "encoder.sentence_encoder.", "encoder.lm_head."
#: Patterns of the names of modules -> fairseq's names.
_NAMES = {
    r"embeddings\.LayerNorm": _ENCODER + "layernorm_embedding",
    r"encoder\.layer\.(\d+)\.attention\.self\.query": _ENCODER + r"layers.\1.self_attn.q_proj",
    r"encoder\.layer\.(\d+)\.attention\.self\.key": _ENCODER + r"layers.\1.self_attn.k_proj",
    r"encoder\.layer\.(\d+)\.attention\.self\.value": _ENCODER + r"layers.\1.self_attn.v_proj",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense": _ENCODER + r"layers.\1.self_attn.out_proj",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": _ENCODER + r"layers.\1.self_attn_layer_norm",
    r"encoder\.layer\.(\d+)\.intermediate\.dense": _ENCODER + r"layers.\1.fc1",
    r"encoder\.layer\.(\d+)\.output\.dense": _ENCODER + r"layers.\1.fc2",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm": _ENCODER + r"layers.\1.final_layer_norm",
    r"cls\.predictions\.transform\.dense|lm_head\.dense": _HEAD + "dense",
    r"cls\.predictions\.transform\.LayerNorm|lm_head\.layer_norm": _HEAD + "layer_norm",
}
_TABLES = tuple(f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
#: Names of the head's bias, the preferred one first.
_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias", "lm_head.bias", "lm_head.decoder.bias")
#: Copies of the embedding, and buffers.
_COPIES = ("cls.predictions.decoder.weight", "lm_head.decoder.weight", "embeddings.position_ids")
_COPIES += ("embeddings.token_type_ids",)
_LEFT_OUT = ("pooler.", "cls.seq_relationship.", "classifier.", "qa_outputs.")


class Sizes(NamedTuple):
    """The numbers of config.json that are read."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    layer_norm_eps: float = 1e-12


def read_bert(folder: Path, config: Mapping[str, Any]) -> ForeignModel:
    """The BERT in ``folder``, whose config.json holds ``config``.

    Raises:
        ValueError: a file is missing or damaged, or ``config`` says what fairseq's model has no counterpart for.
    """
    check_entries(folder / "config.json", config, {**_FIXED, "hidden_act": tuple(_ACTIVATIONS)})
    sizes = _sizes(folder, config)
    return _as_roberta(folder, config, sizes, bert_vocabulary(folder, sizes.vocab_size), first_position=0)


def read_roberta(folder: Path, config: Mapping[str, Any]) -> ForeignModel:
    """The RoBERTa in ``folder``; positions begin behind the row of padding. Raises as ``read_bert`` does."""
    check_entries(folder / "config.json", config, {**_FIXED, "hidden_act": "gelu"})
    sizes = _sizes(folder, config)
    padding = json_files.typed(config.get("pad_token_id", 1), int, f"{folder / 'config.json'}: pad_token_id")
    if not 0 <= padding < sizes.max_position_embeddings - 1:
        raise ValueError(
            f"{folder / 'config.json'} has the pad_token_id {padding}; allowed: from 0 to below "
            f"max_position_embeddings - 1, {sizes.max_position_embeddings - 1}"
        )
    vocabulary = roberta_vocabulary(folder, sizes.vocab_size)
    return _as_roberta(folder, config, sizes, vocabulary, first_position=padding + 1)


def _sizes(folder: Path, config: Mapping[str, Any]) -> Sizes:
    try:
        return json_files.typed({name: x for name, x in config.items() if name in Sizes._fields}, Sizes, "it")
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}; allowed: {ALLOWED}") from error


def _as_roberta(
    folder: Path, config: Mapping[str, Any], sizes: Sizes, vocabulary: Vocabulary, first_position: int
) -> ForeignModel:
    positions = sizes.max_position_embeddings - first_position
    options = [
        *("--encoder-layers", sizes.num_hidden_layers, "--encoder-attention-heads", sizes.num_attention_heads),
        *("--encoder-embed-dim", sizes.hidden_size, "--encoder-ffn-embed-dim", sizes.intermediate_size),
        *("--lineartime-post-norm", "--layernorm-embedding", "--encoder-learned-pos"),
        *("--activation-fn", _ACTIVATIONS[config.get("hidden_act") or "gelu"]),
        *("--lineartime-norm-eps", sizes.layer_norm_eps),
        *("--max-positions", positions, "--tokens-per-sample", positions),
    ]
    tensors = without_prefix(read_tensors(folder), ("bert.", "roberta."))
    weights = _tables(folder, tensors, sizes, vocabulary, first_position)
    left_out = []
    for name, x in tensors.items():
        if name.startswith(_LEFT_OUT):
            left_out.append(name)
        elif name not in (*_TABLES, *_BIASES, *_COPIES):
            weights[_renamed(folder, name)] = x
    if len(tensors[_TABLES[2]]) > 1:
        left_out.append(f"{_TABLES[2]} but for its first row")
    has_head = any(name.startswith(_HEAD) for name in weights.keys() - {_HEAD + "weight"})
    may_be_new = "" if has_head else _HEAD
    sizes_read = (sizes.num_hidden_layers, sizes.hidden_size, positions)
    return ForeignModel("roberta", tuple(map(str, options)), weights, vocabulary, left_out, *sizes_read, may_be_new)


def _tables(
    folder: Path, tensors: Mapping[str, Tensor], sizes: Sizes, vocabulary: Vocabulary, first_position: int
) -> dict[str, Tensor]:
    """The embeddings (V, D) and (P, D), and the head's bias (V,) if there is one, in fairseq's order."""
    counts = (sizes.vocab_size, sizes.max_position_embeddings, None)
    words, positions, types = (
        check_table(folder, tensors, name, rows, sizes.hidden_size) for name, rows in zip(_TABLES, counts)
    )
    before = positions.new_zeros(vocabulary.dictionary.pad() + 1, sizes.hidden_size)  # fairseq reads no row of these
    embedding = words[vocabulary.rows]
    weights = {
        _ENCODER + "embed_tokens.weight": embedding,
        _ENCODER + "embed_positions.weight": torch.cat([before, positions[first_position:] + types[0]]),
        _HEAD + "weight": embedding,
    }
    bias = next((tensors[name] for name in _BIASES if name in tensors), None)
    if bias is not None:
        if bias.shape != (sizes.vocab_size,):
            raise ValueError(
                f"the bias of the head in {folder} has the shape {tuple(bias.shape)}; allowed: ({sizes.vocab_size},)"
            )
        weights[_HEAD + "bias"] = bias[vocabulary.rows]
    return weights


def _renamed(folder: Path, name: str) -> str:
    """fairseq's name of the tensor ``name``."""
    module, _, last = name.rpartition(".")
    last = {"gamma": "weight", "beta": "bias"}.get(last, last)  # as the first files of BERT call them
    pattern = next((pattern for pattern in _NAMES if re.fullmatch(pattern, module)), None)
    if pattern is None or last not in ("weight", "bias"):
        raise ValueError(f"the tensors in {folder} have {name:.100}; allowed: those of BERT and RoBERTa")
    return f"{re.sub(pattern, _NAMES[pattern], module)}.{last}"
