"""Questions, documents and the spans that answer them, on disk, as ``recipes.triviaqa.data`` writes them.

A folder holds ``dict.txt``, and for each SPLIT

* ``question/SPLIT`` and ``document/SPLIT``, subwords as fairseq datasets, without an end of sentence;
* ``SPLIT.json``, the ``questions`` in order: their names and gold answers;
* ``SPLIT.npz``, the pairs of a question and a document, and the gold spans of subwords in each.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fairseq.data import FairseqDataset

from common.files.json_files import read, signed, typed
from common.ops.shared.checks import shortened

from .indexed_sums import load_tokens
from .stored_arrays import read_arrays

DICTIONARY_FILE = "dict.txt"
QUESTION, DOCUMENT = "question", "document"
#: The arrays of a split.
ARRAYS = ("pairs", "counts", "spans")
_ALLOWED = "a folder that python -m recipes.triviaqa.data has written"


class Question(NamedTuple):
    """A question's name, the key of its answer, and its gold answers."""

    name: str
    answers: list[str]


class SpanSplit(NamedTuple):
    """A split with P pairs of a question and a document and S gold spans."""

    questions: list[Question]
    question_tokens: FairseqDataset
    document_tokens: FairseqDataset
    pairs: np.ndarray  # (P, 2), numbers of question and document
    spans: np.ndarray  # (S, 2), first and last subword, in the order of the pairs
    ends: np.ndarray  # (P + 1,), 0 and the end of each pair's spans


def find_dictionary(folder: Path) -> Path:
    """The path of the dictionary of a folder.

    Raises:
        ValueError: it does not exist.
    """
    path = folder / DICTIONARY_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; allowed: {_ALLOWED}")
    return path


def read_span_split(folder: Path, name: str) -> SpanSplit:
    """The split ``name`` of a folder; tokens are read from disk on access.

    Raises:
        ValueError: the split is missing or one of its files is damaged; the message names the file and the field.
    """
    pairs, counts, spans = read_arrays(folder, name, ARRAYS, "a file of recipes.triviaqa.data")
    questions = _read_questions(folder / f"{name}.json")
    tokens = {kind: _read_tokens(folder / kind / name) for kind in (QUESTION, DOCUMENT)}
    if len(questions) != len(tokens[QUESTION]):
        raise ValueError(
            f"{folder / name}.json has {len(questions)} questions and {folder / QUESTION / name} "
            f"{len(tokens[QUESTION])}; allowed: as many"
        )
    path = folder / f"{name}.npz"
    _check_rows(f"{path}: pairs", pairs, np.array([len(questions), len(tokens[DOCUMENT])]))
    if counts.shape != (len(pairs),) or counts.dtype.kind not in "iu" or counts.min() < 0 or counts.sum() != len(spans):
        raise ValueError(f"{path}: counts do not add up to the {len(spans)} spans of {len(pairs)} pairs; allowed: that")
    lengths = np.repeat(tokens[DOCUMENT].sizes[pairs[:, 1]], counts)
    if len(spans):
        _check_rows(f"{path}: spans", spans, np.stack([lengths, lengths], 1))
        if (spans[:, 0] > spans[:, 1]).any():
            raise ValueError(f"{path}: spans has one that ends before it begins; allowed: first and last subword")
    ends = np.concatenate([[0], np.cumsum(counts)])
    return SpanSplit(questions, tokens[QUESTION], tokens[DOCUMENT], pairs, spans.reshape(-1, 2), ends)


def _check_rows(where: str, rows: np.ndarray, limits: np.ndarray) -> None:
    """ValueError that names ``where`` unless ``rows`` (N, 2), N > 0, are integers from 0 to ``limits`` - 1."""
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype.kind not in "iu" or not len(rows):
        raise ValueError(f"{where} has shape {rows.shape} and type {rows.dtype}; allowed: integers (N, 2)")
    wrong = np.argwhere((rows < 0) | (rows >= limits))
    if len(wrong):
        row, column = wrong[0]
        most = np.broadcast_to(limits, rows.shape)[row, column] - 1
        raise ValueError(f"{where} has {rows[row, column]} in row {row}; allowed: 0 to {most}")


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """Write the questions of a split to ``path``, as JSON with a checksum."""
    content = signed({"questions": [question._asdict() for question in questions]})
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_tokens(path: Path) -> FairseqDataset:
    dataset = load_tokens(path, f"allowed: {_ALLOWED}")
    if not len(dataset) or dataset.sizes.min() < 1:
        raise ValueError(f"{path}.idx has an empty text, or none; allowed: {_ALLOWED}")
    return dataset


def _read_questions(path: Path) -> list[Question]:
    content = typed(read(path, _ALLOWED), dict[str, list[Question]], f"{path}: it")
    if content.keys() != {"questions"}:
        raise ValueError(f"{path} holds {shortened(list(content))}; allowed: questions")
    return content["questions"]
