"""Tiny models of each of transformers' classes, and folders with a tokenizer of bytes, as an export writes them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.attention import ATTENTIONS
from common.huggingface import GATED_ATTENTION_UNIT, LineartimeConfig, LineartimeForCausalLM, LineartimeForSeq2SeqLM

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
SIZES = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 48}
SIDE = {**SIZES, "normalize_before": True, "final_norm": True, "max_position_embeddings": 64}


def language_model(attention: list[dict[str, Any]] | None = None, **fields: Any) -> LineartimeForCausalLM:
    """A model of bytes of width 16 with weights under which attention shows, in evaluation mode."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    attention = [{"kind": "linear"}, {"kind": "flow"}] if attention is None else attention
    fields = {**sizes, "max_position_embeddings": 128, **fields}
    return _enlarged(LineartimeForCausalLM(LineartimeConfig(attention=attention, **fields)))


def stock_model() -> LlamaForCausalLM:
    """A model of transformers' own with the same vocabulary and special tokens."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    return _enlarged(LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_attention_heads=2, num_key_value_heads=2)))


def _enlarged(model: nn.Module) -> nn.Module:
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


def save_folder(path: Path, model: nn.Module) -> str:
    """Write ``model`` and the tokenizer to the folder ``path``."""
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def texts(*lengths: int, seed: int = 0, first: int = 2) -> list[Tensor]:
    """Rows of random tokens after the token that begins a text."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, 260, (length,), generator=generator) for length in lengths]
    for row in rows:
        row[:1] = first
    return rows


def padded(rows: list[Tensor], left: bool = True) -> Tensor:
    """Rows of different lengths as one tensor."""
    longest = max(map(len, rows))
    sides = [((longest - len(row), 0) if left else (0, longest - len(row))) for row in rows]
    return torch.stack([nn.functional.pad(row, side, value=1) for row, side in zip(rows, sides)])


def fields_of(kind: type[nn.Module], layers: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The fields of a configuration for ``kind`` with ``layers`` for each side that can have them."""
    causal = [layer for layer in layers if _supports(layer, "causal")]
    bidirectional = [layer for layer in layers if _supports(layer, "bidirectional")]
    decodes = fields.get("is_decoder") or kind in (LineartimeForCausalLM, LineartimeForSeq2SeqLM)
    fields = {**SIDE, "attention": causal if decodes else bidirectional, **fields}
    if kind is LineartimeForSeq2SeqLM:
        sums = [layer for layer in layers if _supports(layer, "source") and "rotary" not in layer]
        sums = sums or [{"kind": "softmax"}]
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
    """A model of any class with two or three layers, drawn from a fixed seed."""
    torch.manual_seed(0)
    layers = [{"kind": "flow"}, {"kind": "bigbird"}, {"kind": "favor"}]
    return kind(LineartimeConfig(**fields_of(kind, layers, **fields)))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
