"""Read the documents of a corpus, one after the other, from its publishers' files."""

import contextlib
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .text_files import read_lines

if TYPE_CHECKING:
    import pyarrow.parquet

#: Newer versions of pyarrow need numpy 2, with which fairseq fails.
_PYARROW = "reading it needs pyarrow: python -m pip install 'pyarrow<22' 'numpy<2'"
#: In a file with this suffix every line is a document. Trials with a user's text use it.
LINES_SUFFIX = ".lines"
#: Wiki-40B's markers for the beginning of titles, headings and paragraphs, and for a line's end inside a paragraph.
_WIKI40B_MARKERS = re.compile("_START_ARTICLE_|_START_SECTION_|_START_PARAGRAPH_|_NEWLINE_")


def read_documents(path: Path) -> Iterator[str]:
    """The texts of a file: rows of Parquet, lines of JSON or of ``LINES_SUFFIX``, or one whole book in a .txt.

    Raises:
        ValueError: another kind of file, one that is damaged, or pyarrow is missing.
    """
    return _reader(path)[0](path)


def count_documents(path: Path) -> int:
    """How many documents ``path`` holds, without decoding them.

    Raises:
        ValueError: as ``read_documents``.
    """
    return _reader(path)[1](path)


def paragraphs(text: str) -> list[str]:
    """The lines of ``text`` that are not blank, with single spaces and without Wiki-40B's markers."""
    lines = _WIKI40B_MARKERS.sub("\n", text).splitlines()
    return [line for line in (" ".join(line.split()) for line in lines) if line]


def read_all(paths: Iterable[Path], limit: int | None = None) -> Iterator[list[str]]:
    """The documents of ``paths`` as paragraphs, at most ``limit``. One document is in memory at a time."""
    documents = (document for path in paths for document in read_documents(path))
    for number, document in enumerate(documents):
        if number == limit:
            return
        yield paragraphs(document)


def _reader(path: Path) -> tuple[Callable[[Path], Iterator[str]], Callable[[Path], int]]:
    for suffix, reader in _READERS.items():
        if path.name.endswith(suffix):
            return reader
    raise ValueError(f"{path} is no file of a corpus; allowed: names that end in {', '.join(_READERS)}")


def require_parquet(what: str) -> None:
    """Raise ValueError if pyarrow is missing; the message begins with ``what``, the file or data set that needs it."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{what}: {_PYARROW}") from error


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    require_parquet(str(path))
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise ValueError(f"no column text among {', '.join(file.schema_arrow.names)}")
            yield file
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; allowed: a whole Parquet file with a column text") from error


def _read_parquet(path: Path) -> Iterator[str]:
    with _parquet(path) as file:
        for batch in file.iter_batches(batch_size=256, columns=["text"]):
            yield from batch.column(0).to_pylist()


def _count_parquet(path: Path) -> int:
    with _parquet(path) as file:
        return file.metadata.num_rows


def _open_json(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return open(path, encoding="utf-8", newline="\n")


def _read_json(path: Path) -> Iterator[str]:
    try:
        with _open_json(path) as file:
            for line in file:
                yield json.loads(line)["text"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error!r}; allowed: whole lines of JSON with a text each") from error


def _count_json(path: Path) -> int:
    try:
        with _open_json(path) as file:
            return sum(1 for _ in file)
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: {error!r}; allowed: whole lines of JSON") from error


def _read_book(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}; allowed: text in UTF-8") from error


_READERS = {
    ".parquet": (_read_parquet, _count_parquet),
    ".json.gz": (_read_json, _count_json),
    ".json": (_read_json, _count_json),
    ".jsonl": (_read_json, _count_json),
    ".txt": (_read_book, lambda path: 1),
    LINES_SUFFIX: (read_lines, lambda path: sum(1 for _ in read_lines(path))),
}
