"""The books of PG-19 from its publisher's bucket, with checksums recorded elsewhere."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from common.files.json_files import read

from ..shared.download import Source, download, fetch
from ..shared.sources import SOURCES

BUCKET = "https://storage.googleapis.com/deepmind-gutenberg/"
#: The same bucket in the list of checksums.
_LISTED = "gs://deepmind-gutenberg/"
_AT_ONCE = 8


def fetch_books(raw: Path) -> list[Path]:
    """Download the books that ``raw`` lacks, and the list of checksums; returns the paths of all books.

    Raises:
        DownloadFailed: the list or a book could not be downloaded whole.
        ValueError: the list of checksums has another format.
    """
    books = _list_books(fetch(SOURCES["pg19_checksums"], raw))
    fetch_all(books, raw)
    return [raw / name for name in books]


def _list_books(path: Path) -> dict[str, Source]:
    """Name of each book -> its address, size and checksum, from the list of checksums at ``path``."""
    try:
        checksums = read(path, "the list of checksums as it was downloaded")["default"]["download_checksums"]
        names = {name: name.removeprefix(_LISTED) for name in checksums if name.endswith(".txt")}
        return {
            name: Source(BUCKET + name, checksums[listed]["num_bytes"], checksums[listed]["checksum"])
            for listed, name in names.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no list of checksums: {error!r}; allowed: as it was downloaded") from error


def fetch_all(sources: Mapping[str, Source], folder: Path) -> None:
    """Download those of ``sources`` that are missing below ``folder``, several at the same time.

    Raises:
        DownloadFailed: a download failed; downloads that have not begun are cancelled.
    """
    missing = [name for name in sources if not (folder / name).exists()]
    with ThreadPoolExecutor(_AT_ONCE) as pool, tqdm(total=len(missing), unit=" files", disable=None) as bar:
        try:
            for _ in pool.map(lambda name: download(sources[name], folder / name, show_progress=False), missing):
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
