"""Files of a data set on the Hugging Face Hub, by huggingface_hub: it continues downloads and honours HF_ENDPOINT."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .download import DownloadFailed, Source


class HubFolder(NamedTuple):
    """A folder in the repository of a data set, at a fixed revision."""

    dataset: str
    revision: str
    folder: str


def fetch_hub(source: HubFolder, folder: Path, choose: Callable[[list[str]], list[str]]) -> list[Path]:
    """Download files of ``source`` into ``folder`` unless they exist there; returns their paths.

    Paths in ``folder`` are those of the repository. Size and sha256 are compared with those that the hub lists.

    Args:
        choose: gets the sorted paths in the repository, and returns those to download.

    Raises:
        DownloadFailed: huggingface_hub is missing or failed, or a file differs from the one that the hub lists.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DownloadFailed(
            f"{source.dataset}: getting it needs huggingface_hub ({error}): python -m pip install huggingface_hub"
        ) from error
    hub, repository = HfApi(), {"repo_type": "dataset", "revision": source.revision}
    with _naming(f"{source.dataset} at {source.revision[:8]}"):
        listed = list(hub.list_repo_tree(source.dataset, source.folder, **repository))
    entries = {entry.path: entry for entry in listed if getattr(entry, "lfs", None)}  # no folders, no small files
    paths = []
    for name in choose(sorted(entries)):
        path = folder / name
        if not path.exists():
            with _naming(f"{source.dataset}, {name}"):
                hub.hf_hub_download(source.dataset, name, local_dir=folder, **repository)
            if difference := Source(name, entries[name].size, entries[name].lfs.sha256).difference(path):
                path.unlink()
                raise DownloadFailed(f"{source.dataset}: {name} {difference}, as the hub lists it")
        paths.append(path)
    return paths


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn errors into DownloadFailed, whose message begins with ``what``."""
    try:
        yield
    except Exception as error:  # of huggingface_hub, the system, or an HTTP library, which differs between versions
        raise DownloadFailed(f"{what}: {error}") from error
