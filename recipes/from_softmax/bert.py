"""A pretrained encoder like BERT, on disk as config.json and model.safetensors, as a masked model of fairseq.

``fairseq_plugin.loading.huggingface`` reads weights and vocabulary, and the package ``tokenizers`` splits texts. BERT's
pooler is left out: no mean over tokens uses it, and fairseq's models have none.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import BertWordPieceTokenizer, Tokenizer
from torch import Tensor, nn

from common.files import tensor_files
from common.modules.stored_options import is_extra_state
from fairseq_plugin.loading.huggingface import ForeignModel, read_foreign_model
from fairseq_plugin.loading.huggingface.folder import read_object
from fairseq_plugin.loading.huggingface.vocabularies import read_pieces
from fairseq_plugin.loading.new_checkpoint import new_checkpoint, new_configuration

from .. import models


class Bert(NamedTuple):
    """An encoder that was read."""

    model: ForeignModel
    tokenizer: Any  # of the package tokenizers; its numbers are rows of the encoder's embedding
    numbers: dict[int, int]  # row -> number in fairseq's dictionary

    def encode(self, text: str, longest: int) -> Tensor:
        """The tokens (T,) of a text, with <s> and </s> in place of [CLS] and [SEP]; at most ``longest``."""
        rows = self.tokenizer.encode(text, add_special_tokens=False).ids[: longest - 2]
        words = self.model.dictionary
        return torch.tensor([words.bos(), *(self.numbers[row] for row in rows), words.eos()])

    def build(self, arch: str, further: Sequence[object] = (), seed: int = 1) -> nn.Module:
        """The masked model ``arch`` with these weights, in evaluation mode; what BERT lacks has its initial values."""
        torch.manual_seed(seed)
        built = models.build(self.model.command(arch, further)[1:], self.model.dictionary)
        initial = {name: x for name, x in built.state_dict().items() if self._has_initial(name)}
        built.load_state_dict({**initial, **self.model.weights})
        return built.eval()

    def _has_initial(self, name: str) -> bool:
        """Whether a tensor of a masked model may keep its initial value: BERT's file need not have it."""
        is_head = self.model.may_be_new and name.startswith(self.model.may_be_new)
        return is_head or ".inner." in name or name.endswith("version") or is_extra_state(name)

    def write(self, path: Path, model: nn.Module, arch: str, further: Sequence[object] = ()) -> None:
        """Write a model of ``build`` as fairseq-train writes it, for all tools of fairseq."""
        configuration = new_configuration(self.model.command(arch, further))
        tensor_files.save(new_checkpoint(configuration, model.state_dict()), path)


def read_bert(folder: Path) -> Bert:
    """Read the encoder in ``folder``.

    Raises:
        ValueError: the folder lacks a file, a file is damaged, or the encoder is not like BERT.
    """
    model = read_foreign_model(folder, ("bert",))
    numbers = {row: number for number, row in enumerate(model.vocabulary.rows.tolist())}
    return Bert(model, _read_tokenizer(folder), numbers)


def _read_tokenizer(folder: Path) -> Any:
    """The tokenizer of tokenizer.json as it is, but for texts of any length, or else of vocab.txt."""
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    given = read_object(config) if config.exists() else {}
    return BertWordPieceTokenizer(
        read_pieces(folder),
        lowercase=bool(given.get("do_lower_case", True)),
        strip_accents=given.get("strip_accents"),
        handle_chinese_chars=bool(given.get("tokenize_chinese_chars", True)),
    )
