"""The paper's three corpora: their sources, the files of each split, and their numbers of documents."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..shared.documents import count_documents, require_parquet
from ..shared.download import DownloadFailed, first_source
from ..shared.hub import HubFolder, fetch_hub
from ..shared.sources import HUB
from ..shared.subword_data import Files
from .books import fetch_books

#: Publishers' name of a split -> fairseq's.
_SPLITS = {"train": "train", "validation": "valid", "test": "test"}


class Corpus(NamedTuple):
    """Sources, files and size of a corpus."""

    title: str
    #: Matches the path of a file; its first group that matched is the publisher's name of the split.
    pattern: re.Pattern
    #: Documents in each split.
    documents: dict[str, int]
    hub: HubFolder
    #: Tried before the hub: downloads into a folder and returns the files.
    before: Callable[[Path], list[Path]] | None = None
    #: Number of training files, if a part of them can be used (C4).
    train_files: int | None = None
    #: For masked language models: the dictionary gets a <mask>.
    masked: bool = False

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of its splits in fairseq."""
        return tuple(self.documents)

    def split_of(self, name: str) -> str | None:
        """The split of the file with this path; None if the corpus has no such file."""
        match = self.pattern.search(name)
        return _SPLITS[next(filter(None, match.groups()))] if match else None


_PARQUET = r"\b(train|validation|test)-[^/]*\.parquet$"

CORPORA = {
    "wiki40b": Corpus(
        "Wiki-40B (English)",
        re.compile(_PARQUET),
        {"train": 2_926_536, "valid": 163_597, "test": 162_274},
        HUB["wiki40b"],
    ),
    "pg19": Corpus(
        "PG-19",
        re.compile(rf"{_PARQUET}|\b(train|validation|test)/\d+\.txt$"),
        {"train": 28_602, "valid": 50, "test": 100},
        HUB["pg19"],
        before=fetch_books,
    ),
    "c4": Corpus(
        "C4 (English)",
        re.compile(r"\bc4-(train|validation)\.[^/]*\.json(?:\.gz)?$"),
        {"train": 364_868_892, "valid": 364_608},
        HUB["c4"],
        train_files=1024,
        masked=True,
    ),
}


def fetch_corpus(corpus: Corpus, raw: Path, shards: int) -> Files:
    """Download ``corpus`` into ``raw`` from the first source that has all of it; only ``shards`` training files of C4.

    Raises:
        DownloadFailed: all sources failed; the message has every reason.
    """
    sources = [partial(_fetch_from_hub, corpus, raw, shards)]
    if corpus.before is not None:
        sources.insert(0, partial(corpus.before, raw))
    return group(corpus, first_source(corpus.title, sources, "give a copy you have: --file FOLDER"))


def _fetch_from_hub(corpus: Corpus, raw: Path, shards: int) -> list[Path]:
    def choose(names: list[str]) -> list[str]:
        files = group(corpus, [Path(name) for name in names if corpus.split_of(name)], shards)
        if missing := [split for split, paths in files.items() if not paths]:
            raise DownloadFailed(f"{corpus.hub.dataset}: no files of {', '.join(missing)}")
        chosen = [path.as_posix() for paths in files.values() for path in paths]
        if any(name.endswith(".parquet") for name in chosen):
            require_parquet(corpus.hub.dataset)  # before gigabytes are downloaded
        return chosen

    return fetch_hub(corpus.hub, raw, choose)


def find_corpus(corpus: Corpus, paths: Iterable[Path], shards: int) -> Files | None:
    """The files of ``corpus`` among a user's files and in their folders; None for a single file of another text.

    Raises:
        ValueError: a path does not exist or is no file of the corpus, or a split is missing.
    """
    paths = list(paths)
    candidates = []
    for path in paths:
        if path.is_dir():
            candidates += [file for file in sorted(path.rglob("*")) if corpus.split_of(file.as_posix())]
        elif not path.is_file():
            raise ValueError(f"--file is {path}, which does not exist; allowed: {_allowed(corpus)}, or any text file")
        elif corpus.split_of(path.absolute().as_posix()):
            candidates.append(path)
        elif len(paths) == 1:
            return None
        else:
            raise ValueError(f"--file is {path}; allowed beside other files: {_allowed(corpus)}")
    files = group(corpus, candidates, shards)
    missing = [split for split in corpus.splits if not files[split]]
    if missing:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"--file is {listed}, without files of {', '.join(missing)}; allowed: {_allowed(corpus)}")
    return files


def _allowed(corpus: Corpus) -> str:
    return f"files of {corpus.title}, whose paths match {corpus.pattern.pattern}, or a folder that holds them"


def group(corpus: Corpus, paths: Iterable[Path], shards: int | None = None) -> Files:
    """``paths`` by split; if a part of the training files can be used, only the first ``shards`` of them."""
    files: Files = {split: [] for split in corpus.splits}
    for path in paths:
        files[corpus.split_of(path.absolute().as_posix())].append(path)
    if corpus.train_files is not None:
        files["train"] = files["train"][:shards]
    return files


def check(corpus: Corpus, files: Files) -> None:
    """Compare the number of documents in the files with that of the corpus.

    Raises:
        ValueError: a split differs. C4's training split is compared only if all of it is used.
    """
    for split, expected in corpus.documents.items():
        if split == "train" and corpus.train_files not in (None, len(files[split])):
            continue
        documents = sum(map(count_documents, files[split]))
        if documents != expected:
            raise ValueError(
                f"the {len(files[split])} files of {split} hold {documents:,} documents; allowed: {expected:,}, which"
                f" {corpus.title} has"
            )
