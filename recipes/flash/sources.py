"""Where the corpora are published: lists of files with sizes and checksums, and getting them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from common.json_files import read

from ..shared.download import DownloadFailed, download, first_source, read_json

#: Hosts with the same addresses below them: Hugging Face's own, and a mirror used in its place through HF_ENDPOINT.
HUBS = ("https://huggingface.co", "https://hf-mirror.com")
#: Hosts that give a file of a GitHub repository at a commit.
GITHUB_URLS = (
    "https://raw.githubusercontent.com/{repository}/{commit}/{path}",
    "https://cdn.jsdelivr.net/gh/{repository}@{commit}/{path}",
)


class Remote(NamedTuple):
    """A file to get."""

    url: str
    name: str  # path below the folder it goes to
    size: int | None = None
    sha256: str | None = None


class Record(NamedTuple):
    """A list of checksums published in a repository, itself known by its checksum."""

    commit: str
    path: str
    size: int
    sha256: str
    config: str  # of the dataset, in the file
    repository: str = "huggingface/datasets"

    @property
    def urls(self) -> list[str]:
        """Addresses of the list."""
        place = {"repository": self.repository, "commit": self.commit, "path": self.path}
        return [pattern.format(**place) for pattern in GITHUB_URLS]


def hub_files(hub: str, dataset: str, revision: str, folder: str) -> list[Remote]:
    """The files in a folder of a dataset repository at ``revision``, with size and checksum as the hub lists them.

    Raises:
        DownloadFailed: the hub gave no list.
    """
    url = f"{hub}/api/datasets/{dataset}/tree/{revision}/{folder}"
    try:
        return [
            Remote(
                f"{hub}/datasets/{dataset}/resolve/{revision}/{entry['path']}",
                Path(entry["path"]).name,
                entry["size"],
                entry["lfs"]["oid"],
            )
            for entry in read_json(url)
            if entry["type"] == "file" and "lfs" in entry
        ]
    except (KeyError, TypeError) as error:
        raise DownloadFailed(f"{url}: no list of files: {error!r}") from error


def recorded_files(record: Record, folder: Path) -> dict[str, Remote]:
    """Recorded address of each file -> its recorded size and checksum. The list is kept in ``folder``.

    Raises:
        DownloadFailed: no source gave exactly this list.
    """
    path = folder / f"{Path(record.path).parent.name}.{Path(record.path).name}"
    if not path.exists():
        gets = [partial(download, url, path, record.size, record.sha256) for url in record.urls]
        first_source("the list of checksums", gets, f"put it at {path}")
    try:
        checksums = read(path, "the list of checksums as it was downloaded")[record.config]["download_checksums"]
        return {url: Remote(url, "", entry["num_bytes"], entry["checksum"]) for url, entry in checksums.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no list of checksums: {error!r}; allowed: as it was downloaded") from error


def fetch(files: Sequence[Remote], folder: Path, at_once: int = 1) -> None:
    """Download ``files`` into ``folder``, but for those that are already there.

    Args:
        at_once: number of simultaneous downloads; more than one helps with many small files.

    Raises:
        DownloadFailed: a file could not be downloaded.
    """
    missing = [file for file in files if not (folder / file.name).exists()]

    def get(file: Remote) -> None:
        download(file.url, folder / file.name, file.size, file.sha256, show_progress=at_once == 1)

    with ThreadPoolExecutor(at_once) as pool, tqdm(total=len(missing), unit=" files", disable=None) as bar:
        try:
            for _ in pool.map(get, missing):
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
