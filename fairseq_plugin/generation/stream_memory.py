"""The decoding states of streams from one batch to the next, and the part that a checkpoint stores."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from torch import Tensor, nn

from common.files.tensor_files import DIGEST, digest
from common.ops.shared.state import joined_entries

from ..data.streams import PLACE, StreamPlace
from ..modules.carried_state import CarriedState
from ..modules.multihead_attention import IncrementalState
from ..modules.named_states import check_named_state, named_state, rows_of, state_of

logger = logging.getLogger(__name__)

#: The entry of a checkpoint: "step", the last batch; "row", the first row; "state" by module name.
SavedStreams = dict[str, Any]
_ALLOWED = (
    "what --task streaming_language_modeling of this version wrote, or --reset-dataloader to begin the epoch anew"
)


class StreamMemory:
    """The states of streams after their last batches, from which each row continues with its next block.

    A trainer may repeat the batches of an update, for example after an overflow, so the state before the first of them
    is kept until the next update. Memory: the states of the batches of an update, and one more.
    """

    def __init__(self) -> None:
        self._after: dict[int, IncrementalState] = {}
        self._last = -1
        self._update: int | None = None
        self._saved: SavedStreams | None = None
        self._where = ""  # the source of ``_saved``, for messages

    def attach(
        self, sample: dict[str, Any], update: int, model: nn.Module | None = None
    ) -> tuple[dict[str, Any], CarriedState]:
        """A new batch with the state from which it continues, and that ``CarriedState``, for ``keep`` afterwards.

        ``update`` is a number that changes when earlier batches will not be repeated. ``model`` is needed to resume
        from a checkpoint.
        """
        place: StreamPlace = sample[PLACE]
        if update != self._update:
            self._after = {step: state for step, state in self._after.items() if step == self._last}
            self._update = update
        tokens = sample["net_input"]["src_tokens"]
        if self._saved is not None and model is not None:
            self._restore(place, len(tokens), tokens.device, model)
        carried = CarriedState(self._before(place, len(tokens)))
        return with_state(sample, carried), carried

    def keep(self, place: StreamPlace, carried: CarriedState) -> None:
        """Store the state after a batch."""
        self._after[place.step], self._last = carried.after, place.step

    def _before(self, place: StreamPlace, rows: int) -> IncrementalState | None:
        if place.step == 0:
            return None
        state = self._after.get(place.step - 1)
        if state is None:
            logger.warning(f"no state is there for batch {place.step + 1} of {place.steps}; its streams begin anew")
            return None
        return rows_of(state, rows)

    def saved(self, model: nn.Module, place: StreamPlace | None) -> SavedStreams | None:
        """States of this process's rows after the last batch ``place``, for a checkpoint; None if all streams ended."""
        if self._saved is not None:  # no batch was read since it was loaded
            return self._saved
        if place is None or place.is_last or place.step not in self._after:
            return None
        named = {name: x.cpu() for name, x in named_state(model, self._after[place.step]).items()}
        return {"step": place.step, "row": place.row, "state": named}

    def restore(self, saved: SavedStreams, where: str) -> None:
        """Resume from the entry ``saved`` of a checkpoint at the next batch, which says its rows; see ``unsealed``."""
        self._saved, self._where = unsealed(saved, where), where

    def _restore(self, place: StreamPlace, rows: int, device: torch.device, model: nn.Module) -> None:
        saved, self._saved = self._saved, None
        try:
            check_named_state(model, saved["state"])
        except ValueError as error:
            raise ValueError(
                f"{self._where}, whose streams are of another model ({error}); allowed: {_ALLOWED}"
            ) from error
        numbers = torch.arange(place.row - saved["row"], place.row - saved["row"] + rows, device=device)
        num_saved = min(len(x) for x in saved["state"].values())
        if saved["step"] == place.step - 1 and int(numbers[0]) >= 0 and int(numbers[-1]) < num_saved:
            self._after, self._last = {saved["step"]: state_of(model, saved["state"], numbers)}, saved["step"]


def sealed(saved: SavedStreams) -> SavedStreams:
    """``saved`` with its digest, for a checkpoint."""
    return {**saved, DIGEST: _digest(saved)}


def unsealed(saved: Any, where: str) -> SavedStreams:
    """``saved`` without the digest of ``sealed``; messages begin with its source ``where``.

    Raises:
        ValueError: ``saved`` has another format, or is damaged.
    """
    names = {"step": int, "row": int, "state": dict, DIGEST: str}
    fits = isinstance(saved, dict) and saved.keys() == names.keys()
    if not fits or not all(type(saved[name]) is kind for name, kind in names.items()):
        raise ValueError(f"{where}, in which there are no states of streams with a digest; allowed: {_ALLOWED}")
    state = saved["state"]
    if (
        not state
        or not all(isinstance(x, Tensor) and x.dim() for x in state.values())
        or saved[DIGEST] != _digest(saved)
    ):
        raise ValueError(f"{where}, in which the states of streams are damaged; allowed: {_ALLOWED}")
    return {name: value for name, value in saved.items() if name != DIGEST}


def _digest(saved: SavedStreams) -> str:
    return digest(saved["state"], {name: str(saved[name]) for name in ("step", "row")})


class StreamingBatches:
    """The batches of ``iterator``, each with the state after the previous batch.

    It can be iterated once, and has the length of ``iterator``, as fairseq's progress bars require.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.n = getattr(iterator, "n", 0)

    def __len__(self) -> int:
        return len(self._iterator)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        memory = StreamMemory()
        for sample in self._iterator:
            if PLACE not in sample:
                yield sample
                continue
            place = sample[PLACE]
            attached, carried = memory.attach(sample, place.step)
            yield attached
            memory.keep(place, carried)


def with_state(sample: dict[str, Any], carried: CarriedState) -> dict[str, Any]:
    """A new batch: ``sample`` with a forward pass that continues from ``carried``."""
    return {**sample, "net_input": {**sample["net_input"], "incremental_state": carried}}


def gathered(own: SavedStreams | None) -> SavedStreams | None:
    """Join the saved states of all training processes in the first process; None in the others.

    Also None if the processes are not at the same batch, as at the end of an epoch. All processes must call it.
    """
    group = distributed_utils.get_data_parallel_group()
    count, rank = distributed_utils.get_world_size(group), distributed_utils.get_rank(group)
    parts: list[SavedStreams | None] | None = [None] * count if rank == 0 else None
    dist.gather_object(own, parts, dst=dist.get_global_rank(group, 0), group=group)
    if parts is None or any(part is None or part["step"] != parts[0]["step"] for part in parts):
        return None
    parts.sort(key=lambda part: part["row"])
    states: list[dict[str, Tensor]] = [part["state"] for part in parts]
    joined = {name: joined_entries(name.rpartition(".")[2], [state[name] for state in states]) for name in states[0]}
    return {**parts[0], "state": joined}
