"""Write data sets that fairseq's loaders read, with fairseq's own writer, for data that is not text.

The files are those of fairseq-preprocess, which only accepts lines of words and ends each line with ``</s>``.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset

from fairseq_plugin.data.indexed_sums import write_sums


def write_dictionary(folder: Path, dictionary: Dictionary, name: str = "dict.txt") -> None:
    """Write ``folder``/``name``."""
    dictionary.save(str(folder / name))


def check_dictionary(folder: Path, name: str) -> None:
    """Raise ValueError if ``folder``, the value of the option ``name``, has no dictionary."""
    if not (folder / "dict.txt").is_file():
        raise ValueError(f"{name} is {folder}, which has no dict.txt; allowed: a data-bin folder")


def write_split(folder: Path, split: str, sequences: Iterable[np.ndarray], symbols: int) -> None:
    """Write sequences of tokens (T,), below ``symbols``, as a split of the data set in ``folder``."""
    with split_writer(folder, split, symbols) as write:
        for sequence in sequences:
            write(sequence)


@contextlib.contextmanager
def split_writer(folder: Path, split: str, symbols: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield a function that writes the next sequence of tokens (T,), below ``symbols``, of a split in ``folder``.

    Checksums are written at the end; see ``fairseq_plugin.data.indexed_sums``.
    """
    prefix = str(folder / split)
    builder = indexed_dataset.make_builder(indexed_dataset.data_file_path(prefix), "mmap", vocab_size=symbols)
    yield lambda sequence: builder.add_item(torch.from_numpy(sequence))
    builder.finalize(indexed_dataset.index_file_path(prefix))
    write_sums(folder / split)


def count_tokens(folder: Path, split: str) -> int:
    """The number of tokens of a split that fairseq's loader sees."""
    dataset = indexed_dataset.make_dataset(str(folder / split), "mmap")  # keep a reference: its sizes are freed with it
    return int(dataset.sizes.sum(dtype=np.int64))
