"""Folders with a tiny language model and a tokenizer of bytes, as an export writes them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from common.huggingface import LineartimeConfig, LineartimeForCausalLM

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
ATTENTION = [{"kind": "linear"}, {"kind": "flow"}]


def language_model(attention: list[dict[str, Any]] = ATTENTION, **fields: Any) -> LineartimeForCausalLM:
    """A model of width 16 with weights under which attention shows, in evaluation mode."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 128}
    config = LineartimeConfig(attention=attention, vocab_size=260, **{**sizes, **fields})
    model = LineartimeForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    model.tie_weights()
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, after fairseq's special ones."""
    tokens = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL)


def save_folder(path: Path, model: LineartimeForCausalLM) -> Path:
    """Write ``model`` and the tokenizer to the folder ``path``."""
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
