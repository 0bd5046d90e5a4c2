"""The books of PG-19 from its publisher's bucket, with checksums recorded elsewhere."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from common.json_files import read

from ..shared.download import Source, download, fetch
from ..shared.sources import SOURCES

BUCKET = "https://storage.googleapis.com/deepmind-gutenberg/"
#: How the list of checksums writes it.
_LISTED = "gs://deepmind-gutenberg/"
_AT_ONCE = 8


def fetch_books(raw: Path) -> list[Path]:
    """Download all books into ``raw``, but for those that are there; returns them. The list of checksums stays there.

    Raises:
        DownloadFailed: the list or a book could not be downloaded whole.
        ValueError: the list is none.
    """
    books = _list_books(fetch(SOURCES["pg19_checksums"], raw))
    fetch_all(books, raw)
    return [raw / name for name in books]


def _list_books(path: Path) -> dict[str, Source]:
    """Name of each book -> its address, size and checksum."""
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
    """Download ``sources`` to their paths below ``folder``, several at the same time, but for those that are there.

    Raises:
        DownloadFailed: one could not be downloaded; the others that were not begun are not tried.
    """
    missing = [name for name in sources if not (folder / name).exists()]
    with ThreadPoolExecutor(_AT_ONCE) as pool, tqdm(total=len(missing), unit=" files", disable=None) as bar:
        try:
            for _ in pool.map(lambda name: download(sources[name], folder / name, show_progress=False), missing):
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
