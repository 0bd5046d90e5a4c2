"""Documents in the rows of fairseq's batches: where they begin, and how layers and positions learn of them.

Each eos ends a document. In the input of a language model tokens are shifted by one: the eos that ended a document
stands where the first token of the next one is predicted, so that one begins *at* an eos. In the input of a masked
model nothing is shifted, and a document begins *after* an eos.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from common.modules.remembered_options import RECORD, RemembersOptions
from common.ops.shared.segments import SEGMENT, find_documents

from .reading_on import positions_after


class DocumentsOfTokens(NamedTuple):
    """The documents of tokens (B, T)."""

    ids: Tensor  # (B, T), of each token's document, for ``segment_ids``
    start: Tensor  # (B, T): what positions begin from at each token; see ``positions_from``
    longest: Tensor  # (B,): real tokens of the longest document of a row so far
    seen: dict[str, Tensor]  # what has to be known to go on: the last document's id and real tokens, (B,) each


def begin_at_eos(tokens: Tensor, eos: int, before: Tensor | None = None) -> Tensor:
    """Ids of the documents of a language model's input (B, T), after ``before`` (B,): the id of the document so far."""
    ids = tokens.eq(eos).cumsum(1)
    return ids if before is None else before[:, None] + ids


def begin_after_eos(tokens: Tensor, eos: int) -> Tensor:
    """Ids of the documents of a masked model's input (B, T)."""
    ends = tokens.eq(eos).long()
    return ends.cumsum(1) - ends


def read_documents(
    tokens: Tensor, ids: Tensor, padding_idx: int, seen: dict[str, Tensor] | None = None
) -> DocumentsOfTokens:
    """The documents ``ids`` (B, T) of ``tokens`` (B, T), after those of ``seen``; O(B T)."""
    padding = tokens.eq(padding_idx)
    state, before = (None, None) if seen is None else ({SEGMENT: seen["document"]}, seen["count"])
    found = find_documents(ids, padding, state, tokens.unsqueeze(-1))
    places = found.positions(before)
    longest = (places + 1).masked_fill(padding, 0).amax(1)
    return DocumentsOfTokens(
        found.ids, places + 1 - (~padding).cumsum(1), longest, {"count": found.counts(before), "document": found.last}
    )


@contextmanager
def within_documents(
    layers: nn.Module, embed_positions: nn.Module | None, documents: DocumentsOfTokens
) -> Iterator[None]:
    """Inside, tokens see those of their own document alone in each of ``layers``, and positions count those."""

    def give(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "segment_ids": documents.ids}

    with ExitStack() as hooks, positions_after(embed_positions, documents.start):
        for layer in _all(layers):
            hooks.callback(layer.register_forward_pre_hook(give, with_kwargs=True).remove)
        yield


def _all(layers: nn.Module) -> Iterable[nn.Module]:
    """Every layer: with layer drop, iterating over the list itself leaves some out at random."""
    return layers.children()


class ResetAtEos(RemembersOptions):
    """Whether weights are of a model whose documents do not see each other, for the record of a state dict.

    Files of models that have not the option stay as they were: there is no record then, and none is missed.
    """

    belongs_to = "documents"

    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.resets = resets

    def remembered_options(self) -> dict[str, Any]:
        """The option."""
        return {"reset_at_eos": self.resets}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.resets:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.resets or prefix + RECORD in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *rest)
