"""A pretrained encoder like BERT, on disk as config.json and model.safetensors, as a masked model of fairseq.

Its weights and its vocabulary are read by ``fairseq_plugin.loading.huggingface``, for ``fairseq_plugin.convert`` too.
Here are the tokens of a text, and models that are built without a file. BERT's pooler is left out: its output is used
by no mean over tokens, and fairseq's models have none.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from torch import Tensor, nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.files import tensor_files
from common.modules.stored_options import is_extra_state
from fairseq_plugin.loading.huggingface import ForeignModel, read_foreign_model
from fairseq_plugin.loading.new_checkpoint import new_checkpoint, new_configuration

from ..shared.fairseq_models import model_options
from ..shared.working_folder import atomic_write
from .wordpiece import WordPiece, numbers_in, read_wordpiece


class Bert(NamedTuple):
    """An encoder that was read."""

    model: ForeignModel
    tokenizer: WordPiece
    pieces: dict[str, int]  # piece -> its number in fairseq's dictionary

    @property
    def dictionary(self) -> Dictionary:
        """fairseq's dictionary, with <mask>."""
        return self.model.dictionary

    def encode(self, text: str, longest: int) -> Tensor:
        """The tokens (T,) of a text, with <s> and </s> in place of [CLS] and [SEP]; at most ``longest``."""
        pieces = self.tokenizer.pieces(text)[: longest - 2]
        symbols = self.dictionary
        return torch.tensor([symbols.bos(), *(self.pieces[piece] for piece in pieces), symbols.eos()])

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
    """
    model, tokenizer = read_foreign_model(folder, ("bert",)), read_wordpiece(folder)
    return Bert(model, tokenizer, numbers_in(model.dictionary, tokenizer))


def write_checkpoint(path: Path, model: nn.Module, command: Sequence[object]) -> None:
    """Write ``model`` as fairseq-train with the arguments ``command`` writes it, for all tools of fairseq."""
    with atomic_write(path) as part:
        tensor_files.save(new_checkpoint(new_configuration(command), model.state_dict()), part)
