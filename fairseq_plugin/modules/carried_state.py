"""The decoding states before and after a block of a stream, for the forward pass of a model."""

from typing import Any

from torch import Tensor

from .multihead_attention import IncrementalState


class CarriedState:
    """Decoding state before and after a block of tokens, for ``model(src_tokens, incremental_state=...)``.

    ``before`` is the state before the first token, None at the beginning of a stream; it is not changed. After the
    forward pass, ``after`` is the state after the last token, detached, so that no gradient leaves the block. This is
    a class, not a dictionary, since data parallelism rebuilds dictionaries that are passed to a model.
    """

    def __init__(self, before: IncrementalState | None = None) -> None:
        self.before: IncrementalState = before or {}
        self.after: IncrementalState = {}

    def open(self) -> "ReadBeforeWriteAfter":
        """A state for one forward pass, and for its layers that activation checkpointing repeats."""
        return ReadBeforeWriteAfter(self.before)

    def close(self, written: "ReadBeforeWriteAfter") -> None:
        """Store the ``written`` state as ``after``; later writes of repeated layers are ignored."""
        self.after = {
            key: {name: None if x is None else x.detach() for name, x in entries.items()}
            for key, entries in written.items()
        }


class ReadBeforeWriteAfter(dict[str, dict[str, Tensor | None]]):
    """A state whose reads always come from ``before``, so that a repeated layer starts from the same state."""

    def __init__(self, before: IncrementalState) -> None:
        super().__init__()
        self.before = before

    def __contains__(self, key: Any) -> bool:
        return key in self.before

    def __getitem__(self, key: str) -> dict[str, Tensor | None]:
        return self.before[key]
