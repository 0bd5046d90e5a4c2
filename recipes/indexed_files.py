"""Tokens in the files that fairseq's loaders read, by fairseq's own writer: what ``fairseq-preprocess`` writes.

fairseq-preprocess itself takes words in lines of text and ends each line with ``</s>``; this is for what is no text.
"""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset

from .text_files import part


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write into, which replaces ``path`` when the block has ended without an error."""
    unfinished = part(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    shutil.rmtree(path, ignore_errors=True)
    unfinished.replace(path)


def write_dictionary(folder: Path, dictionary: Dictionary) -> None:
    """Write ``folder``/dict.txt."""
    dictionary.save(str(folder / "dict.txt"))


def write_split(folder: Path, split: str, sequences: Iterable[np.ndarray], symbols: int) -> None:
    """Write sequences of tokens (T,), below ``symbols``, as a split of the data set in ``folder``."""
    prefix = str(folder / split)
    builder = indexed_dataset.make_builder(indexed_dataset.data_file_path(prefix), "mmap", vocab_size=symbols)
    for sequence in sequences:
        builder.add_item(torch.from_numpy(sequence))
    builder.finalize(indexed_dataset.index_file_path(prefix))


def count_tokens(folder: Path, split: str) -> int:
    """Tokens of a split, as fairseq's loader sees them."""
    dataset = indexed_dataset.make_dataset(str(folder / split), "mmap")  # its sizes do not outlive it
    return int(dataset.sizes.sum(dtype=np.int64))
