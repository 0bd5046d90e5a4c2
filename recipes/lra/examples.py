"""Labelled sequences on disk, as fairseq's task ``sentence_prediction`` reads them.

For each example, ``data-bin/input0`` has the sequence, ``data-bin/input1`` the second sequence of tasks with two, and
``data-bin/label`` the class. Sequences have no end-of-sentence token.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset
from tqdm import tqdm

from common.files.output_files import new_folder
from fairseq_plugin.data.pixels import FIRST_TOKEN

from ..shared.indexed_files import split_writer, write_dictionary

#: The recorded writer of data-bin folders; all recipes of the Arena share it, so any may replace such a folder.
WRITER = "recipes.lra.examples"
SPLITS = ("train", "valid", "test")


class Example(NamedTuple):
    """The tokens (T,) of one or two inputs, and the class index."""

    inputs: tuple[np.ndarray, ...]
    label: int


def symbol_dictionary(symbols: Sequence[str]) -> Dictionary:
    """fairseq dictionary of ``symbols``: symbol number s is token ``FIRST_TOKEN`` + s."""
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


def write_examples(
    data_bin: Path,
    splits: Mapping[str, Iterable[Example]],
    dictionary: Dictionary,
    classes: int,
    total: int | None = None,
    inputs: int = 1,
) -> dict[str, int]:
    """Write ``splits`` to the folder ``data_bin``, which is created only if everything could be written.

    Args:
        classes: number of classes; labels are 0 to ``classes`` - 1.
        total: number of examples in all splits, for the progress bar.
        inputs: sequences per example, 1 or 2.

    Returns:
        The number of examples of each split.

    Raises:
        ValueError: a split has no examples, or ``data_bin`` contains files that this function did not write.
    """
    labels = symbol_dictionary([str(label) for label in range(classes)])
    kinds = {f"input{number}": dictionary for number in range(inputs)} | {"label": labels}
    counts = dict.fromkeys(splits, 0)
    with (
        new_folder(data_bin, WRITER) as folder,
        tqdm(total=total, desc="data-bin", unit=" examples", disable=None) as bar,
    ):
        for kind, symbols in kinds.items():
            (folder / kind).mkdir()
            write_dictionary(folder / kind, symbols)
        for split, examples in splits.items():
            with contextlib.ExitStack() as writers:
                write: dict[str, Callable[[np.ndarray], None]] = {
                    kind: writers.enter_context(split_writer(folder / kind, split, len(symbols)))
                    for kind, symbols in kinds.items()
                }
                for example in examples:
                    for number, tokens in enumerate(example.inputs):
                        write[f"input{number}"](tokens)
                    write["label"](np.array([example.label + FIRST_TOKEN], np.int32))
                    counts[split] += 1
                    bar.update()
            if not counts[split]:
                raise ValueError(f"{split} has no examples; allowed: at least 1")
    return counts


def read_labels(data_bin: Path, split: str) -> torch.Tensor:
    """The classes of all examples of a split, int64.

    Raises:
        ValueError: the folder has no such split.
    """
    labels = indexed_dataset.make_dataset(str(data_bin / "label" / split), "mmap")
    if not labels:
        raise ValueError(f"{data_bin} has no examples in {split}; allowed: a complete folder of recipes.lra")
    return torch.cat([labels[i] for i in range(len(labels))]) - FIRST_TOKEN
