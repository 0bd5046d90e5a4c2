"""Real text that every machine has: Python's standard library, split by file, one line per file.

fairseq reads one document per line and splits tokens at whitespace, so whitespace other than the space is written as a
visible mark (newline as "⏎"); sentencepiece writes the space as "▁". Both are lossless: ``from_line(to_line(t))`` is
``t``, and decoding an encoded line gives the line back.
"""

import hashlib
import io
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from .working_folder import atomic_write

#: Whitespace characters that a document may contain, other than the space -> their marks.
MARKS = {"\n": "⏎", "\t": "⇥", "\f": "␌"}
SPACE_PIECE = "▁"

#: Folders with tests, third-party packages, or tables of numbers instead of text.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idle_test encodings pydoc_data lib2to3 turtledemo __pycache__".split()
)

#: Bytes of text per split. The demo trains for about one epoch.
SPLIT_BYTES = {"test": 120_000, "valid": 60_000, "train": 1_250_000}
#: Larger files are skipped: one of them would fill most of a small split.
MAX_FILE_BYTES = 60_000


class Document(NamedTuple):
    """One source file."""

    name: str  # path below the library's folder, with forward slashes
    text: str

    @property
    def size(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text.encode())


def to_line(text: str) -> str:
    """``text`` as one line: newline, tab and form feed become visible marks.

    Raises:
        ValueError: ``text`` contains one of the marks, or other whitespace, at which fairseq would split tokens.
    """
    for character in text:
        if character in MARKS.values() or character == SPACE_PIECE or _is_foreign_space(character):
            raise ValueError(f"text holds {character!r}; allowed: no marks, and no whitespace but space, \\n, \\t, \\f")
    return text.translate(str.maketrans(MARKS))


def from_line(line: str) -> str:
    """The inverse of ``to_line``; also replaces sentencepiece's mark of the space."""
    return line.translate(str.maketrans({mark: space for space, mark in MARKS.items()})).replace(SPACE_PIECE, " ")


def _is_foreign_space(character: str) -> bool:
    return character.isspace() and character != " " and character not in MARKS


def read_library(folder: Path | None = None) -> Iterator[Document]:
    """Yield the library's source files without duplicates, ordered by a hash of their names (a fixed shuffle).

    Files that are empty, very large, not UTF-8 or contain characters that ``to_line`` refuses are skipped.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else Path(folder)
    seen = set()
    for path in sorted(folder.rglob("*.py"), key=lambda path: _digest(path.relative_to(folder).as_posix())):
        name = path.relative_to(folder)
        if SKIPPED_FOLDERS.intersection(name.parts) or not 0 < path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8").strip() + "\n"
            to_line(text)
        except ValueError:  # includes UnicodeDecodeError
            continue
        if text != "\n" and text not in seen:
            seen.add(text)
            yield Document(name.as_posix(), text)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def split_by_file(documents: Iterator[Document], split_bytes: dict[str, int]) -> dict[str, list[Document]]:
    """Assign whole documents to one split after the other until each has its bytes; the last may get fewer.

    Raises:
        ValueError: there is not enough text for every split to get a document.
    """
    splits: dict[str, list[Document]] = {name: [] for name in split_bytes}
    remaining_bytes = dict(split_bytes)
    for document in documents:
        split = next((name for name in remaining_bytes if remaining_bytes[name] > 0), None)
        if split is None:
            break
        splits[split].append(document)
        remaining_bytes[split] -= document.size
    empty = [name for name in splits if not splits[name]]
    if empty:
        raise ValueError(f"no document left for the splits {', '.join(empty)}; allowed: a folder with more *.py text")
    return splits


def train_sentencepiece(documents: list[Document], path: Path, vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """Train a lossless byte-pair model and write it: no normalisation, all spaces kept, unknown characters as bytes."""
    # Train on source lines, not documents: sentencepiece skips sentences longer than a few thousand bytes.
    lines = (to_line(line) for document in documents for line in document.text.splitlines(keepends=True))
    model_file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model_file,
        model_type="bpe",
        vocab_size=vocab_size,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,  # indentation
        byte_fallback=True,
        character_coverage=0.9999,
        user_defined_symbols=list(MARKS.values()),
        num_threads=2,
        minloglevel=2,
    )
    with atomic_write(path) as part:
        part.write_bytes(model_file.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model_file.getvalue())


def write_split(documents: list[Document], model: sentencepiece.SentencePieceProcessor, path: Path) -> int:
    """Write one document per line as subwords; returns the number of tokens, including one end per document."""
    tokens = 0
    with atomic_write(path) as part, open(part, "w", encoding="utf-8") as file:
        for document in documents:
            pieces = model.encode(to_line(document.text), out_type=str)
            tokens += len(pieces) + 1
            file.write(" ".join(pieces) + "\n")
    return tokens


def decode(pieces: list[str], model: sentencepiece.SentencePieceProcessor) -> str:
    """Decode subwords to the original text."""
    return from_line(model.decode_pieces(pieces))
