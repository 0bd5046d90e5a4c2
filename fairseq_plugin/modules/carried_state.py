"""The decoding state that a block of a stream begins with and ends with, through the forward pass of a model."""

from typing import Any

from torch import Tensor

from .multihead_attention import IncrementalState


class CarriedState:
    """Decoding state before and after a block of tokens, for ``model(src_tokens, incremental_state=...)``.

    ``before`` is the state at the first token, None where a stream begins; it is not changed. After the forward pass
    ``after`` is the state after the last token, detached, so that no gradient leaves the block. This is a class and no
    dictionary, since data parallelism rebuilds dictionaries on the way to a model.
    """

    def __init__(self, before: IncrementalState | None = None) -> None:
        self.before: IncrementalState = before or {}
        self.after: IncrementalState = {}

    def open(self) -> "ReadBeforeWriteAfter":
        """A state for one forward pass, and for the passes by which activation checkpointing repeats its layers."""
        return ReadBeforeWriteAfter(self.before)

    def close(self, written: "ReadBeforeWriteAfter") -> None:
        """Keep what was ``written``; what layers that are repeated write later is not kept."""
        self.after = {
            key: {name: None if x is None else x.detach() for name, x in entries.items()}
            for key, entries in written.items()
        }


class ReadBeforeWriteAfter(dict[str, dict[str, Tensor | None]]):
    """A state that is read from ``before`` whatever was written: a layer that is run twice goes on from the same."""

    def __init__(self, before: IncrementalState) -> None:
        super().__init__()
        self.before = before

    def __contains__(self, key: Any) -> bool:
        return key in self.before

    def __getitem__(self, key: str) -> dict[str, Tensor | None]:
        return self.before[key]
