"""How far back a language model reads: needles that it finds again, and perplexity beyond its training length."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from common.attention import ATTENTIONS

from .. import positions
from ..positions import Bin
from . import needles
from .forms import Form

#: Needles that are looked for at each distance.
_TRIALS = 64


class Reach(NamedTuple):
    """Stored results of a model."""

    found: list[float]  # per cent of the symbols of needles, by distance
    bins: list[Bin]  # losses by position; empty if the model's formula depends on the longest length

    def as_record(self) -> dict[str, Any]:
        """The results as JSON values."""
        return {"found": self.found, "bins": [part._asdict() for part in self.bins]}


class Contexts(NamedTuple):
    """The texts on which the reach of models is measured."""

    length: int  # of the training
    questions: list[Tensor]  # by distance, (trials, length + 1)
    windows: Tensor  # (W, longest + 1)
    choices: int  # symbols that the needles are drawn from

    @property
    def longest(self) -> int:
        """The tokens of a window."""
        return self.windows.shape[1] - 1


def read_contexts(data: Path, length: int, longest: int, most: int) -> Contexts:
    """Needles in the test text of a data-bin folder at every distance, and at most ``most`` windows of it.

    Raises:
        ValueError: the text is too short for them, or has too few symbols.
    """
    text = positions.read_stream(data)
    windows = positions.windows(text, length, longest, most)
    symbols = needles.symbols_of(Dictionary.load(str(data / "dict.txt")))
    distances = needles.distances(length)
    questions = [needles.questions(text, length, x, _TRIALS, symbols) for x in distances]
    return Contexts(length, questions, windows, len(symbols.others))


def overrides(form: Form | None, contexts: Contexts) -> dict[str, int]:
    """The options with which a model is loaded, so that it reads windows; ``form`` is None for the teacher."""
    return {} if _has_length(form) else {"max_target_positions": contexts.longest}


def measure(model: nn.Module, form: Form | None, contexts: Contexts, title: str) -> Reach:
    """The reach of a model; ``form`` is None for the teacher."""
    found = [_share_found(model, tokens) for tokens in contexts.questions]
    bins = []
    if not _has_length(form):
        bins = positions.binned(positions.losses(model, contexts.windows, title), contexts.length)
    return Reach(found, bins)


def _has_length(form: Form | None) -> bool:
    """Whether the formula of an attention depends on the longest length for which the model was built."""
    return form is not None and any("max_tokens" in ATTENTIONS[kind].needs for kind in form.kinds)


@torch.no_grad()
def _share_found(model: nn.Module, tokens: Tensor) -> float:
    """Per cent of the symbols of answers (trials, length + 1) that are the model's most probable ones.

    Each symbol is predicted after the correct ones before it.
    """
    scores = model(tokens[:, :-1])[0][:, -needles.ANSWER :]
    return 100.0 * float((scores.argmax(-1) == tokens[:, -needles.ANSWER :]).double().mean())
