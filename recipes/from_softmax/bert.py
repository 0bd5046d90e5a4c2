"""A pretrained encoder like BERT, on disk as config.json and model.safetensors, as a masked model of fairseq.

Its weights and its vocabulary are read by ``fairseq_plugin.loading.huggingface``, for ``fairseq_plugin.convert`` too;
the package ``tokenizers`` splits texts. Here are models that are built without a file. BERT's pooler is left out: its
output is used by no mean over tokens, and fairseq's models have none.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.files import tensor_files
from common.modules.stored_options import is_extra_state
from fairseq_plugin.loading.huggingface import ForeignModel, read_foreign_model
from fairseq_plugin.loading.huggingface.folder import read_object
from fairseq_plugin.loading.huggingface.vocabularies import read_pieces
from fairseq_plugin.loading.new_checkpoint import new_checkpoint, new_configuration

from ..shared.fairseq_models import model_options
from ..shared.scripts import RecipeFailed
from ..shared.working_folder import atomic_write


class Bert(NamedTuple):
    """An encoder that was read."""

    model: ForeignModel
    tokenizer: Any  # of the package tokenizers; its numbers are rows of the encoder's embedding
    numbers: dict[int, int]  # row -> number in fairseq's dictionary

    @property
    def dictionary(self) -> Dictionary:
        """fairseq's dictionary, with <mask>."""
        return self.model.dictionary

    def encode(self, text: str, longest: int) -> Tensor:
        """The tokens (T,) of a text, with <s> and </s> in place of [CLS] and [SEP]; at most ``longest``."""
        rows = self.tokenizer.encode(text, add_special_tokens=False).ids[: longest - 2]
        return torch.tensor([self.dictionary.bos(), *(self.numbers[row] for row in rows), self.dictionary.eos()])

    def command(self, arch: str, further: Sequence[object] = ()) -> list[str]:
        """The arguments of fairseq-train that build a masked model around these weights; ``further`` ones are last."""
        return self.model.command(arch, further)

    def build(self, arch: str, further: Sequence[object] = (), seed: int = 1) -> nn.Module:
        """The masked model ``arch`` with these weights, in evaluation mode; what BERT lacks has its initial values.

        Raises:
            ValueError: a tensor is missing, or has another shape than config.json says.
        """
        torch.manual_seed(seed)
        task = SimpleNamespace(source_dictionary=self.dictionary)
        model = tasks.FairseqTask.build_model(task, model_options(self.command(arch, further)))
        initial = {name: x for name, x in model.state_dict().items() if self._has_initial(name)}
        model.load_state_dict({**initial, **self.model.weights})
        return model.eval()

    def _has_initial(self, name: str) -> bool:
        """Whether a tensor of a masked model may keep its initial value: BERT's file need not have it."""
        is_head = self.model.may_be_new and name.startswith(self.model.may_be_new)
        return is_head or ".inner." in name or name.endswith("version") or is_extra_state(name)


def read_bert(folder: Path) -> Bert:
    """Read the encoder in ``folder``.

    Raises:
        ValueError: the folder lacks a file, a file is damaged, or the encoder is not like BERT.
        RecipeFailed: tokenizers is not installed.
    """
    model = read_foreign_model(folder, ("bert",))
    numbers = {row: number for number, row in enumerate(model.vocabulary.rows.tolist())}
    return Bert(model, _read_tokenizer(folder), numbers)


def _read_tokenizer(folder: Path) -> Any:
    """The tokenizer of tokenizer.json as it is, but for texts of any length, or else of vocab.txt."""
    try:
        from tokenizers import BertWordPieceTokenizer, Tokenizer
    except ModuleNotFoundError as error:
        raise RecipeFailed(f"texts need the package tokenizers ({error}). Run: pip install tokenizers") from error
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not path.exists():
        given = read_object(config) if config.exists() else {}
        return BertWordPieceTokenizer(
            read_pieces(folder),
            lowercase=bool(given.get("do_lower_case", True)),
            strip_accents=given.get("strip_accents"),
            handle_chinese_chars=bool(given.get("tokenize_chinese_chars", True)),
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # of no class of its own
        raise ValueError(f"{path} cannot be read: {error}; allowed: as tokenizers writes it") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def write_checkpoint(path: Path, model: nn.Module, command: Sequence[object]) -> None:
    """Write ``model`` as fairseq-train with the arguments ``command`` writes it, for all tools of fairseq."""
    with atomic_write(path) as part:
        tensor_files.save(new_checkpoint(new_configuration(command), model.state_dict()), part)
