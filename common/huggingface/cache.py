"""The decoding state of a model as transformers' cache, which for most mechanisms has a constant size."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..files.tensor_files import read_safetensors, save_safetensors
from ..ops.shared.checks import shortened
from ..ops.shared.state import State
from .tokens import SEEN

#: The key of the number of token columns in the metadata of a saved cache, which says that the file is one.
_COLUMNS = "lineartime_cache_columns"
#: The parts of a cache, in the names of saved tensors: self-attention, attention to a source, and tokens so far.
_SELF, _SOURCE, _SEEN = "self", "source", "seen"
_NUMBER = re.compile("[0-9]{1,15}")


class LineartimeCache(Cache):
    """The state of every layer after the tokens so far, and the number of real tokens of each row.

    ``model(..., use_cache=True)`` returns one, and ``model(..., cache=cache)`` goes on from it, with one token or many.
    A model replaces the tensors of a cache that it is given, as transformers' own do. All tensors have the batch as
    their first dimension, so rows can be selected, repeated and reordered. A state holds sums over tokens, from which
    none can be removed again.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        #: The state of each layer's self-attention, and of its attention to the source in an encoder-decoder.
        self.states: list[State] = []
        self.source_states: list[State] = []
        #: Real tokens of each row so far, ``count`` (B,); with several documents per row, those of the last document
        #: and its id, ``document`` (B,). And the number of all of them and what tells them from others: ``read``,
        #: ``first`` and ``fingerprint`` (B,), see ``tokens.fingerprint``.
        self.seen: State = {}
        #: Tokens of each row so far, with padding.
        self.columns = 0

    def __repr__(self) -> str:
        """The number of layers, rows and tokens."""
        return f"{type(self).__name__}(layers={len(self)}, rows={self.batch_size}, tokens={self.columns})"

    def __len__(self) -> int:
        """The number of layers; 0 before the first tokens."""
        return len(self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens of each row so far, with padding."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """transformers' value for no limit, -1."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """``get_max_length`` in earlier versions of transformers."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The length and the offset of a mask for ``query_length`` further tokens."""
        return self.columns + query_length, 0

    @property
    def batch_size(self) -> int:
        """The number of rows; -1 before the first tokens."""
        return len(self.seen["count"]) if self.seen else -1

    @property
    def is_compileable(self) -> bool:
        """False: the cache of a model is a new set of tensors after each call."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether there have been tokens."""
        return bool(self.states)

    @property
    def is_croppable(self) -> bool:
        """False; see ``crop``."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer, so that ``generate`` removes from a prompt the tokens that the cache has seen."""
        return [False] * max(1, len(self))

    @property
    def is_sliding(self) -> list[bool]:
        """False for each layer."""
        return [False] * len(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues from row ``beam_idx[i]``."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, integers or a mask of rows."""
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, one after the other."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> "LineartimeCache":
        """Move all tensors to ``device``; returns the cache itself."""
        self._map(lambda x: x.to(device))
        return self

    def copy(self) -> "LineartimeCache":
        """Another cache with the same tensors, which a model replaces and never changes."""
        cache = LineartimeCache()
        cache.states, cache.source_states = list(self.states), list(self.source_states)
        cache.seen, cache.columns = dict(self.seen), self.columns
        return cache

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError unless ``tokens_to_remove`` is 0: sums over tokens cannot be undone."""
        if tokens_to_remove != 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is called; allowed for a cache of sums: 0, as no token can be removed from "
                "them. Keep a copy() of the cache to go back to"
            )

    def reset(self) -> None:
        """Forget all tokens."""
        self.states, self.source_states, self.seen, self.columns = [], [], {}, 0

    def save(self, path: str | os.PathLike) -> None:
        """Write the cache to the file ``path`` as safetensors, for ``load``.

        Raises:
            ValueError: there have been no tokens.
            OSError: the file cannot be written.
        """
        if not self.states:
            raise ValueError("the cache is empty; allowed for save: a cache after at least one token")
        tensors = {f"{_SEEN}.{name}": x for name, x in self.seen.items()}
        for part, states in ((_SELF, self.states), (_SOURCE, self.source_states)):
            for layer, state in enumerate(states):
                tensors |= {f"{part}.{layer}.{name}": x for name, x in state.items()}
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            save_safetensors(tensors, unfinished, {_COLUMNS: str(self.columns)})
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> "LineartimeCache":
        """The cache in the file ``path``, on ``device``. Runs no code.

        It must be of the same model: one with another number of layers or rows refuses it, and most with other
        attentions, but not a model with other weights.

        Raises:
            ValueError: the file is missing, damaged, or no cache.
        """
        tensors, metadata = read_safetensors(Path(path))
        columns = metadata.get(_COLUMNS, "")
        if not _NUMBER.fullmatch(columns):
            raise ValueError(f"{os.fspath(path)!r} holds no cache; allowed: a file of LineartimeCache.save")
        cache = cls()
        cache.columns = int(columns)
        parts: dict[str, dict[int, State]] = {_SELF: {}, _SOURCE: {}}
        try:
            for full_name, tensor in tensors.items():
                part, _, rest = full_name.partition(".")
                layer, _, name = rest.partition(".")
                if part == _SEEN:
                    cache.seen[rest] = tensor
                elif part in parts and _NUMBER.fullmatch(layer) and name:
                    parts[part].setdefault(int(layer), {})[name] = tensor
                else:
                    raise ValueError(f"a tensor {shortened(full_name)}")
            for part, layers in parts.items():
                if sorted(layers) != list(range(len(layers))):
                    raise ValueError(f"the layers {', '.join(map(str, sorted(layers)))} of {part!r}")
            cache.states, cache.source_states = ([states[i] for i in range(len(states))] for states in parts.values())
            cache._check()
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)!r} has {error}; allowed: a file of LineartimeCache.save, as it was written"
            ) from None
        return cache.to(device)

    def _check(self) -> None:
        """Raise ValueError, with what is wrong, unless the parts of a cache that was read fit together."""
        if len(self.source_states) not in (0, len(self)) or not self.states:
            raise ValueError(f"{len(self)} layers, and the source's state of {len(self.source_states)}")
        names = set(self.seen)
        if names - {"document"} != SEEN:
            raise ValueError(f"numbers of tokens {sorted(names)} in place of {sorted(SEEN)}")
        shape = self.seen["count"].shape
        for name, x in self.seen.items():
            if x.dtype != torch.int64 or x.dim() != 1 or x.shape != shape:
                raise ValueError(f"{name!r} of shape {tuple(x.shape)} and {x.dtype}")
        for name, x in ((name, x) for state in (*self.states, *self.source_states) for name, x in state.items()):
            if x.dim() == 0 or len(x) != self.batch_size:
                raise ValueError(f"{name!r} of shape {tuple(x.shape)} for {self.batch_size} rows")

    def check_fits(self, layers: int, rows: int) -> None:
        """Raise ValueError unless this is the cache of ``layers`` layers and ``rows`` rows, or empty."""
        if self.states and (len(self), self.batch_size) != (layers, rows):
            raise ValueError(
                f"cache has {len(self)} layers and {self.batch_size} rows; allowed for this model and input: {layers} "
                f"layers and {rows} rows"
            )

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor x by ``change(x)``."""
        for states in (self.states, self.source_states):
            states[:] = [{name: change(x) for name, x in state.items()} for state in states]
        self.seen = {name: change(x) for name, x in self.seen.items()}


def check_cache(cache: Any) -> LineartimeCache:
    """``cache`` itself; ValueError if it is of another class."""
    if not isinstance(cache, LineartimeCache):
        given = type(cache).__name__
        raise ValueError(f"cache is a {given}; allowed: None or a LineartimeCache, which this model returns")
    return cache
