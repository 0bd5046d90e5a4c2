"""Documents in the rows of fairseq's batches: how layers and positions get to know them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from common.modules.stored_options import EXTRA_STATE, StoresOptions
from common.ops.shared.segments import SEGMENT, find_documents

from .chunked_prefill import positions_after


class DocumentsOfTokens(NamedTuple):
    """The documents of tokens (B, T)."""

    ids: Tensor  # (B, T), the document of each token, for ``segment_ids``
    start: Tensor  # (B, T): the start of positions at each token; see ``positions_from``
    longest: Tensor  # (B,): the number of real tokens of the longest document of each row so far
    seen: dict[str, Tensor]  # the state to continue from: the last document's id and number of real tokens, (B,) each


def read_documents(
    tokens: Tensor, ids: Tensor, padding_idx: int, seen: dict[str, Tensor] | None = None
) -> DocumentsOfTokens:
    """The documents with ``ids`` (B, T) of ``tokens`` (B, T), after those in ``seen``; O(B T)."""
    padding = tokens.eq(padding_idx)
    state, before = (None, None) if seen is None else ({SEGMENT: seen["document"]}, seen["count"])
    documents = find_documents(ids, padding, state, tokens.unsqueeze(-1))
    positions = documents.positions(before)
    longest = (positions + 1).masked_fill(padding, 0).amax(1)
    return DocumentsOfTokens(
        documents.ids,
        positions + 1 - (~padding).cumsum(1),
        longest,
        {"count": documents.counts(before), "document": documents.last},
    )


@contextmanager
def within_documents(
    layers: nn.Module, embed_positions: nn.Module | None, documents: DocumentsOfTokens
) -> Iterator[None]:
    """Inside, tokens only see their own document in each of ``layers``, and positions count within documents."""

    def add_segment_ids(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "segment_ids": documents.ids}

    with ExitStack() as hooks, positions_after(embed_positions, documents.start):
        for layer in _all(layers):
            hooks.callback(layer.register_forward_pre_hook(add_segment_ids, with_kwargs=True).remove)
        yield


def _all(layers: nn.Module) -> Iterable[nn.Module]:
    """All layers; with layer drop, iterating over the list itself skips layers at random."""
    return layers.children()


class ResetAtEos(StoresOptions):
    """Records in a state dict whether the documents of a model do not see each other.

    State dicts of models without the option have no record, and do not need one.
    """

    belongs_to = "documents"

    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.resets = resets

    def stored_options(self) -> dict[str, Any]:
        """The option."""
        return {"reset_at_eos": self.resets}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.resets:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.resets or prefix + EXTRA_STATE in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *rest)
