"""A pretrained encoder like BERT, on disk as config.json and model.safetensors, as a masked model of fairseq.

Post-norm, learned positions, GELU and the eps of the LayerNorms are options of ``NAME_mlm``. The embedding of the first
token type, which every token of a single text has, is added to the positions. BERT's pooler is left out: its output is
used by no mean over tokens, and fairseq's models have none. Nothing that is read runs code.

Legend: V symbols, P positions, D width.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.checkpoints import read_checkpoint
from common.files import json_files, tensor_files
from common.modules.stored_options import is_record

from ..shared.fairseq_models import model_options, parsed_options
from ..shared.working_folder import atomic_write
from .wordpiece import CLS, MASK, PAD, SEP, UNKNOWN, WordPiece, numbered, read_wordpiece

_ALLOWED = "the folder of an encoder like BERT, with config.json, model.safetensors and its tokenizer's files"
#: What config.json must say -> what it says where an entry is missing.
_FIXED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_ENCODER = "encoder.sentence_encoder."
#: Patterns of BERT's names -> fairseq's.
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
    r"cls\.predictions\.transform\.dense": "encoder.lm_head.dense",
    r"cls\.predictions\.transform\.LayerNorm": "encoder.lm_head.layer_norm",
}
#: Names of tensors that are read in another way, or not at all.
_TABLES = tuple(f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
_BIAS = "cls.predictions.bias"
_LEFT_OUT = ("embeddings.position_ids", "pooler.", "cls.seq_relationship.", "cls.predictions.decoder.")


class Sizes(NamedTuple):
    """The entries of config.json that are numbers."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    layer_norm_eps: float = 1e-12


class Bert(NamedTuple):
    """An encoder that was read."""

    sizes: Sizes
    weights: dict[str, Tensor]  # under fairseq's names
    tokenizer: WordPiece
    dictionary: Dictionary  # of fairseq, with <mask>
    pieces: dict[str, int]  # piece -> its number there

    def encode(self, text: str, longest: int) -> Tensor:
        """The tokens (T,) of a text, with <s> and </s> in place of [CLS] and [SEP]; at most ``longest``."""
        pieces = self.tokenizer.pieces(text)[: longest - 2]
        symbols = self.dictionary
        return torch.tensor([symbols.bos(), *(self.pieces[piece] for piece in pieces), symbols.eos()])

    def command(self, arch: str, further: Sequence[object] = ()) -> list[object]:
        """The arguments of fairseq-train that build a masked model around these weights; ``further`` ones are last."""
        sizes = self.sizes
        return [
            *("data", "--task", "masked_lm", "--arch", arch),
            *("--encoder-layers", sizes.num_hidden_layers, "--encoder-attention-heads", sizes.num_attention_heads),
            *("--encoder-embed-dim", sizes.hidden_size, "--encoder-ffn-embed-dim", sizes.intermediate_size),
            *"--lineartime-post-norm --layernorm-embedding --encoder-learned-pos --activation-fn gelu".split(),
            *("--lineartime-norm-eps", sizes.layer_norm_eps, "--dropout", 0.0, "--attention-dropout", 0.0),
            *("--max-positions", sizes.max_position_embeddings, "--tokens-per-sample", sizes.max_position_embeddings),
            *further,
        ]

    def build(self, arch: str, further: Sequence[object] = (), seed: int = 1) -> nn.Module:
        """The masked model ``arch`` with these weights, in evaluation mode; what BERT lacks has its initial values.

        Raises:
            ValueError: a tensor is missing, or has another shape than config.json says.
        """
        torch.manual_seed(seed)
        task = SimpleNamespace(source_dictionary=self.dictionary)
        model = tasks.FairseqTask.build_model(task, model_options(self.command(arch, further)))
        initial = {name: x for name, x in model.state_dict().items() if _has_initial(name)}
        model.load_state_dict({**initial, **self.weights})
        return model.eval()


def read_bert(folder: Path) -> Bert:
    """Read the encoder in ``folder``.

    Raises:
        ValueError: the folder lacks a file, a file is damaged, or the encoder is not like BERT.
    """
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"--folder is {folder}, which has no {name}; allowed: {_ALLOWED}")
    sizes, tokenizer = _read_sizes(folder / "config.json"), read_wordpiece(folder)
    special = [tokenizer.vocabulary[piece] for piece in (CLS, PAD, SEP, UNKNOWN)]  # in the order of fairseq's symbols
    usual = list(numbered(tokenizer))
    rows = [*special, *(row for _, row in usual), tokenizer.vocabulary[MASK]]
    if len(set(rows)) < len(rows) or max(rows) >= sizes.vocab_size or min(rows) < 0:
        raise ValueError(
            f"the tokenizer in {folder} has {len(rows)} pieces with rows up to {max(rows)}; allowed: a row for each, "
            f"below vocab_size, {sizes.vocab_size}"
        )
    dictionary = Dictionary()
    for piece in [*(piece for piece, _ in usual), "<mask>"]:
        dictionary.add_symbol(piece)
    if len(dictionary) != len(rows):
        raise ValueError(f"the tokenizer in {folder} has a piece that is a symbol of fairseq's; allowed: none")
    stored = read_checkpoint(folder / "model.safetensors")
    weights = _renamed({name.removeprefix("bert."): x for name, x in stored.items()}, torch.tensor(rows), folder)
    pieces = dict(zip((CLS, PAD, SEP, UNKNOWN, *(piece for piece, _ in usual), MASK), range(len(rows))))
    return Bert(sizes, weights, tokenizer, dictionary, pieces)


def write_checkpoint(path: Path, model: nn.Module, command: Sequence[object]) -> None:
    """Write ``model`` as fairseq-train with the arguments ``command`` writes it, for all tools of fairseq."""
    config = OmegaConf.to_container(
        convert_namespace_to_omegaconf(parsed_options(command)), resolve=True, enum_to_str=True
    )
    history = {"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "num_updates": 0}
    extra = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "version": 2}, "val_loss": None}
    state = {"args": None, "cfg": config, "model": model.state_dict(), "criterion": None, "task_state": {}}
    state |= {"optimizer_history": [{**history, "lr_scheduler_state": {"best": None}}], "extra_state": extra}
    with atomic_write(path) as part:
        tensor_files.save(state, part)


def _read_sizes(path: Path) -> Sizes:
    content = json_files.read(path, _ALLOWED)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no object of JSON; allowed: {_ALLOWED}")
    for name, value in _FIXED.items():
        if content.get(name, value) != value:
            raise ValueError(f"{path} has the {name} {content[name]!r}; allowed: {value}")
    try:
        return json_files.typed({name: x for name, x in content.items() if name in Sizes._fields}, Sizes, "it")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; allowed: {_ALLOWED}") from error


def _renamed(stored: dict[str, Tensor], rows: Tensor, folder: Path) -> dict[str, Tensor]:
    """``stored`` under fairseq's names; ``rows`` (V,) are those of the embedding in the order of the dictionary.

    Raises:
        ValueError: a table is missing, or there is a tensor that BERT has not.
    """
    missing = [name for name in _TABLES if name not in stored]
    if missing:
        raise ValueError(f"model.safetensors in {folder} has no {missing[0]}; allowed: {_ALLOWED}")
    words, positions, types = (stored[name] for name in _TABLES)
    nothing = positions.new_zeros(Dictionary().pad() + 1, positions.shape[1])  # of fairseq's numbers before the first
    weights = {
        _ENCODER + "embed_tokens.weight": words[rows],
        _ENCODER + "embed_positions.weight": torch.cat([nothing, positions + types[0]]),
        "encoder.lm_head.weight": words[rows],
    }
    if _BIAS in stored:
        weights["encoder.lm_head.bias"] = stored[_BIAS][rows]
    for name, x in stored.items():
        if name in (*_TABLES, _BIAS) or name.startswith(_LEFT_OUT):
            continue
        module, _, last = name.rpartition(".")
        pattern = next((pattern for pattern in _NAMES if re.fullmatch(pattern, module)), None)
        last = {"gamma": "weight", "beta": "bias"}.get(last, last)  # as the first files of BERT call them
        if pattern is None or last not in ("weight", "bias"):
            raise ValueError(f"model.safetensors in {folder} has {name:.100}; allowed: tensors of BERT")
        weights[f"{re.sub(pattern, _NAMES[pattern], module)}.{last}"] = x
    return weights


def _has_initial(name: str) -> bool:
    """Whether a tensor of a masked model may keep its initial value: BERT's file need not have it."""
    return ".inner." in name or name.startswith("encoder.lm_head.") or name.endswith("version") or is_record(name)
