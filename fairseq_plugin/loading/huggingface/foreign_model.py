"""A model of a Hugging Face folder in fairseq's terms: weights, dictionary, and the options that build it."""

import io
from collections.abc import Sequence
from typing import NamedTuple

from fairseq.data import Dictionary
from torch import Tensor

from .vocabularies import Vocabulary

#: Command-line words that select fairseq's task for models of this kind, by the stock model.
_TASKS = {"roberta": ("--task", "masked_lm"), "transformer_lm": ("--task", "language_modeling")}


class ForeignModel(NamedTuple):
    """A model that was read."""

    #: fairseq's model whose weights have these names, shapes and meaning: "roberta" or "transformer_lm".
    stock: str
    #: The options of fairseq-train that build it, without task, architecture and dropout.
    options: tuple[str, ...]
    #: Tensors in float32 under fairseq's names.
    weights: dict[str, Tensor]
    vocabulary: Vocabulary
    #: Names of weights in the folder that fairseq's model has no counterpart for.
    left_out: list[str]
    num_layers: int
    embed_dim: int
    #: The most tokens of an input.
    max_positions: int
    #: Prefix of weights that the folder lacks and that may keep their initial values; "" if none may.
    may_be_new: str = ""

    @property
    def dictionary(self) -> Dictionary:
        """fairseq's dictionary."""
        return self.vocabulary.dictionary

    def command(self, arch: str, further: Sequence[object] = ()) -> list[str]:
        """Arguments of fairseq-train that build the architecture ``arch`` around these weights, without dropout.

        ``further`` arguments come last, so they win.
        """
        dropout = ("--dropout", "0.0", "--attention-dropout", "0.0")
        return ["data", *_TASKS[self.stock], "--arch", arch, *self.options, *dropout, *map(str, further)]

    def files(self) -> dict[str, str]:
        """Names and contents of the files that fairseq needs beside the weights: dict.txt, and those of a BPE."""
        content = io.StringIO()
        self.dictionary.save(content)
        return {"dict.txt": content.getvalue(), **self.vocabulary.files}
