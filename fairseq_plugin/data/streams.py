"""Batches in which each row is a stream: the block of a row follows its block in the previous batch.

N blocks of a text are split into R rows of consecutive blocks; the first N mod R rows have one block more than others.
Batch t has block t of each row. So the rows of a batch are the first rows of the previous batch.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator

#: The entry of a batch with its ``StreamPlace``.
PLACE = "stream"


@dataclass(frozen=True)
class StreamRows:
    """N = ``blocks`` blocks of ``tokens`` tokens each (the last may have fewer), in R = ``rows`` streams.

    Raises:
        ValueError: there are more rows than blocks.
    """

    blocks: int
    rows: int
    tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= self.blocks:
            raise ValueError(
                f"--batch-size (in validation --batch-size-valid; without it --max-tokens / --tokens-per-sample) gives "
                f"{self.rows} streams over all processes; allowed: from 1 to {self.blocks}, the blocks of "
                f"{self.tokens} tokens in the data"
            )

    @property
    def steps(self) -> int:
        """The number of batches, ceil(N / R)."""
        return -(-self.blocks // self.rows)

    def block(self, row: int, step: int) -> int | None:
        """The number of the block of ``row`` in batch ``step``; None if the row has ended."""
        length, longer = divmod(self.blocks, self.rows)
        if step >= length + (row < longer):
            return None
        return row * length + min(row, longer) + step

    def batches(self, shards: int) -> list[list[int]]:
        """Batches of block numbers, for ``shards`` processes in turn; each process has its own rows. O(N)."""
        own_rows = self.rows // shards
        batches = []
        for step in range(self.steps):
            for shard in range(shards):
                numbers = (self.block(row, step) for row in range(shard * own_rows, (shard + 1) * own_rows))
                batches.append([number for number in numbers if number is not None])
        return batches

    def place(self, block: int) -> tuple[int, int]:
        """The row and the step of the block with number ``block``."""
        length, longer = divmod(self.blocks, self.rows)
        ends = longer * (length + 1)
        if block < ends:
            return divmod(block, length + 1)
        row, step = divmod(block - ends, length)
        return longer + row, step


@dataclass(frozen=True)
class StreamPlace:
    """The position of a batch: ``step`` of ``steps``; its first row is number ``row`` over all processes."""

    step: int
    steps: int
    row: int

    @property
    def is_last(self) -> bool:
        """Whether this is the last batch."""
        return self.step + 1 == self.steps


@dataclass(frozen=True)
class StreamCollater:
    """The dataset's ``collater``, which also adds the ``StreamPlace`` of the batch."""

    collater: Callable[[list[dict[str, Any]]], dict[str, Any]]
    rows: StreamRows

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """fairseq's batch with its ``StreamPlace``; an empty one for a process whose rows have ended."""
        if not samples:
            return {}
        row, step = self.rows.place(int(samples[0]["id"]))
        return {**self.collater(samples), PLACE: StreamPlace(step, self.rows.steps, row)}


class StreamBatchIterator(EpochBatchIterator):
    """fairseq's iterator over the batches of ``StreamRows``, in order; ``options`` are those of fairseq's.

    Raises:
        ValueError: a loaded state was saved in the middle of an epoch with other rows or blocks, or by another task.
    """

    def __init__(self, dataset: FairseqDataset, rows: StreamRows, num_shards: int, **options: Any) -> None:
        self.rows = rows
        super().__init__(
            dataset=dataset,
            collate_fn=StreamCollater(dataset.collater, rows),
            batch_sampler=rows.batches(num_shards),
            num_shards=num_shards,
            disable_shuffling=True,
            **options,
        )

    def state_dict(self) -> dict[str, Any]:
        """As fairseq's, with the rows."""
        return {**super().state_dict(), "rows": asdict(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As fairseq's; ValueError for other rows unless an epoch begins."""
        if state_dict.get("iterations_in_epoch", 0) > 0:
            self._check(state_dict.get("rows"))
        super().load_state_dict(state_dict)

    def _check(self, saved: dict[str, int] | None) -> None:
        hint = "; allowed in the middle of an epoch: the same, or --reset-dataloader to begin the epoch anew"
        if saved is None:
            raise ValueError(f"the checkpoint is of another --task than streaming_language_modeling{hint}")
        names = {
            "tokens": "--tokens-per-sample",
            "rows": "--batch-size times the processes",
            "blocks": "the number of blocks in the data",
        }
        for name, label in names.items():
            if saved.get(name) != getattr(self.rows, name):
                current = getattr(self.rows, name)
                raise ValueError(f"{label} is {current}, and was {saved.get(name)} in the checkpoint{hint}")
