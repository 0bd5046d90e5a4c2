"""GPT-2 as fairseq's ``transformer_lm``: pre-norm layers, learned positions, a final norm, one projection for q, k, v.

GPT-2's end of a text is fairseq's ``</s>``, with which each sequence begins. ``<pad>`` and ``<unk>``, which GPT-2 has
not, and ``<s>`` have the same row, as in GPT-2's own tokenizer. So each has the probability of ``</s>``: all others are
divided by 1 + 3 p, where p is GPT-2's probability of the end of a text, until the model has been trained on.

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
from .vocabularies import gpt2_vocabulary

#: Activations in fairseq's words.
_ACTIVATIONS = {"gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate", "gelu": "gelu", "relu": "relu"}
#: What config.json must say where it says anything.
_FIXED = {
    "activation_function": tuple(_ACTIVATIONS),
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "pruned_heads": {},
}
#: Patterns of the names of modules -> fairseq's names.
_NAMES = {
    r"h\.(\d+)\.ln_1": r"decoder.layers.\1.self_attn_layer_norm",
    r"h\.(\d+)\.attn\.c_attn": r"decoder.layers.\1.self_attn.{}_proj",
    r"h\.(\d+)\.attn\.c_proj": r"decoder.layers.\1.self_attn.out_proj",
    r"h\.(\d+)\.ln_2": r"decoder.layers.\1.final_layer_norm",
    r"h\.(\d+)\.mlp\.c_fc": r"decoder.layers.\1.fc1",
    r"h\.(\d+)\.mlp\.c_proj": r"decoder.layers.\1.fc2",
    r"ln_f": "decoder.layer_norm",
}
#: Causal masks, which are buffers.
_MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_WORDS, _POSITIONS, _HEAD = "wte.weight", "wpe.weight", "lm_head.weight"
_LEFT_OUT = ("score.", "classifier.", "multiple_choice_head.")


class Sizes(NamedTuple):
    """The numbers of config.json that are read."""

    n_embd: int
    n_layer: int
    n_head: int
    n_positions: int
    vocab_size: int
    bos_token_id: int = 50256
    eos_token_id: int = 50256
    n_inner: int | None = None
    pad_token_id: int | None = None


def read_gpt2(folder: Path, config: Mapping[str, Any]) -> ForeignModel:
    """The GPT-2 in ``folder``, whose config.json holds ``config``.

    Raises:
        ValueError: a file is missing or damaged, or ``config`` says what fairseq's model has no counterpart for.
    """
    path = folder / "config.json"
    check_entries(path, config, _FIXED)
    try:
        sizes = json_files.typed({name: x for name, x in config.items() if name in Sizes._fields}, Sizes, "it")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; allowed: {ALLOWED}") from error
    begin, end = sizes.bos_token_id, sizes.eos_token_id
    padding = end if sizes.pad_token_id is None else sizes.pad_token_id
    vocabulary = gpt2_vocabulary(folder, sizes.vocab_size, begin, end, padding)
    tied = config.get("tie_word_embeddings") is not False
    tensors = without_prefix(read_tensors(folder), ("transformer.",))
    words = check_table(folder, tensors, _WORDS, sizes.vocab_size, sizes.n_embd)
    positions = check_table(folder, tensors, _POSITIONS, sizes.n_positions, sizes.n_embd)
    head = words if tied else check_table(folder, tensors, _HEAD, sizes.vocab_size, sizes.n_embd)
    before = positions.new_zeros(vocabulary.dictionary.pad() + 1, sizes.n_embd)  # fairseq reads no row of these
    embedding = words[vocabulary.rows]
    weights = {
        "decoder.embed_tokens.weight": embedding,
        "decoder.embed_positions.weight": torch.cat([before, positions]),
        "decoder.output_projection.weight": embedding if tied else head[vocabulary.rows],
    }
    left_out = [name for name in tensors if name.startswith(_LEFT_OUT)]
    for name in tensors:
        if name not in (_WORDS, _POSITIONS, _HEAD, *left_out) and not _MASKS.fullmatch(name):
            weights |= _renamed(folder, name, tensors[name])
    options, sizes_read = _options(sizes, config, tied), (sizes.n_layer, sizes.n_embd, sizes.n_positions)
    return ForeignModel("transformer_lm", options, weights, vocabulary, left_out, *sizes_read)


def _options(sizes: Sizes, config: Mapping[str, Any], tied: bool) -> tuple[str, ...]:
    """The options of fairseq-train that build the model."""
    options = [
        *("--decoder-layers", sizes.n_layer, "--decoder-attention-heads", sizes.n_head),
        *("--decoder-embed-dim", sizes.n_embd, "--decoder-input-dim", sizes.n_embd),
        *("--decoder-output-dim", sizes.n_embd, "--decoder-ffn-embed-dim", sizes.n_inner or 4 * sizes.n_embd),
        *("--decoder-learned-pos", "--no-scale-embedding"),
        *("--activation-fn", _ACTIVATIONS[config.get("activation_function") or "gelu_new"]),
        *("--max-target-positions", sizes.n_positions, "--tokens-per-sample", sizes.n_positions),
        *(["--share-decoder-input-output-embed"] if tied else []),
    ]
    return tuple(map(str, options))


def _renamed(folder: Path, name: str, x: Tensor) -> dict[str, Tensor]:
    """The tensor ``x`` of a layer under fairseq's names; GPT-2 stores the weights of linear layers transposed."""
    module, _, last = name.rpartition(".")
    pattern = next((pattern for pattern in _NAMES if re.fullmatch(pattern, module)), None)
    if pattern is None or last not in ("weight", "bias") or x.dim() > 2:
        raise ValueError(f"the tensors in {folder} have {name:.100} {tuple(x.shape)}; allowed: those of GPT-2")
    renamed = f"{re.sub(pattern, _NAMES[pattern], module)}.{last}"
    if "{}" in renamed:
        return {renamed.format(side): part.t().contiguous() for side, part in zip("qkv", x.chunk(3, dim=-1))}
    return {renamed: x.t().contiguous()}
