"""The paper's three corpora: where each comes from, which files are which split, how many documents it has."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..shared.download import DownloadFailed, first_source
from .documents import count_documents, require_parquet
from .sources import HUBS, Record, Remote, fetch, hub_files, recorded_files

#: Split -> its files, in order.
Files = dict[str, list[Path]]
#: Publishers' name of a split -> fairseq's.
_SPLITS = {"train": "train", "validation": "valid", "test": "test"}

#: A folder to keep lists in, how many training shards -> the files of one source.
Listing = Callable[[Path, int], list[Remote]]


class Corpus(NamedTuple):
    """Sources, files and size of a corpus."""

    title: str
    #: Matches the path of a file; its first group that matched is the publisher's name of the split.
    pattern: re.Pattern
    #: Documents in each split.
    documents: dict[str, int]
    listings: tuple[Listing, ...]
    #: Files of the training split; only C4's can be used in part.
    train_files: int | None = None
    #: Trained on as a masked language model, whose dictionary gets a <mask>.
    masked: bool = False
    #: Files downloaded at the same time.
    at_once: int = 1

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits it has, as fairseq names them."""
        return tuple(self.documents)

    def split_of(self, name: str) -> str | None:
        """The split that a file of this path belongs to; None for no file of the corpus."""
        match = self.pattern.search(name)
        return _SPLITS[next(filter(None, match.groups()))] if match else None


def list_hub_parquet(hub: str, dataset: str, revision: str, folder: str, raw: Path, shards: int) -> list[Remote]:
    require_parquet(dataset)  # before gigabytes are downloaded
    return hub_files(hub, dataset, revision, folder)


#: The list made when the dataset was added to Hugging Face's library (its pull request 306, 2020).
PG19_RECORD = Record(
    "6ce73f6263f9fc3df0db84ae7f937d27a5c208f7",
    "datasets/pg19/dataset_infos.json",
    4_190_146,
    "e1aee83469a852323b2a93a16772e4f17b33a7c5a675daf70488d59f42c076f7",
    "default",
)
PG19_BUCKET = "https://storage.googleapis.com/deepmind-gutenberg/"


def list_pg19_bucket(raw: Path, shards: int) -> list[Remote]:
    files = recorded_files(PG19_RECORD, raw)
    names = {url: url.removeprefix("gs://deepmind-gutenberg/") for url in files}
    return [
        file._replace(url=PG19_BUCKET + names[url], name=names[url])
        for url, file in files.items()
        if names[url].endswith(".txt")
    ]


#: The list of release 2.4.0 of Hugging Face's library.
C4_RECORD = Record(
    "401d4c4f9b9594cb6527c599c0e7a72ce1a0ea49",
    "datasets/c4/dataset_infos.json",
    2_396_072,
    "87da4361a73a9454de9eaeb6e59f4bec3df82afd68bce9ce7ab9f8c904f68e5a",
    "en",
)
C4_SHARDS = 1024


def list_hub_c4(hub: str, raw: Path, shards: int) -> list[Remote]:
    files = recorded_files(C4_RECORD, raw)
    remotes = [
        file._replace(url=url.replace("https://huggingface.co", hub), name=Path(url).name)
        for url, file in sorted(files.items())
    ]
    train = [file for file in remotes if "c4-train." in file.name]
    return train[:shards] + [file for file in remotes if "c4-validation." in file.name]


_PARQUET = r"\b(train|validation|test)-[^/]*\.parquet$"

CORPORA = {
    "wiki40b": Corpus(
        "Wiki-40B (English)",
        re.compile(_PARQUET),
        {"train": 2_926_536, "valid": 163_597, "test": 162_274},
        tuple(
            partial(list_hub_parquet, hub, "google/wiki40b", "06bfe584d8193cf58f79c6354ecc2a2b94a7deea", "en")
            for hub in HUBS
        ),
    ),
    "pg19": Corpus(
        "PG-19",
        re.compile(rf"{_PARQUET}|\b(train|validation|test)/\d+\.txt$"),
        {"train": 28_602, "valid": 50, "test": 100},
        (
            list_pg19_bucket,
            *(
                partial(list_hub_parquet, hub, "emozilla/pg19", "b7bca68072ef1d86348f080bbda0996648d94315", "data")
                for hub in HUBS
            ),
        ),
        at_once=8,
    ),
    "c4": Corpus(
        "C4 (English)",
        re.compile(r"\bc4-(train|validation)\.[^/]*\.json(?:\.gz)?$"),
        {"train": 364_868_892, "valid": 364_608},
        tuple(partial(list_hub_c4, hub) for hub in HUBS),
        train_files=C4_SHARDS,
        masked=True,
    ),
}


def fetch_corpus(corpus: Corpus, raw: Path, shards: int) -> Files:
    """Get ``corpus`` into ``raw`` from the first source that gives it whole; of C4 only ``shards`` training files.

    Raises:
        DownloadFailed: no source did; the message has every reason.
    """

    def source(listing: Listing) -> Files:
        remotes = [remote for remote in listing(raw, shards) if corpus.split_of(remote.name)]
        files = group(corpus, (raw / remote.name for remote in remotes))
        missing = [split for split in corpus.splits if not files[split]]
        if missing:
            raise DownloadFailed(f"{remotes[0].url if remotes else 'a source'}: no files of {', '.join(missing)}")
        fetch(remotes, raw, corpus.at_once)
        return files

    sources = [partial(source, listing) for listing in corpus.listings]
    return first_source(corpus.title, sources, "give a copy you have: --file FOLDER")


def find_corpus(corpus: Corpus, paths: Iterable[Path], shards: int) -> Files | None:
    """The files of ``corpus`` that the user has: folders, searched, and files. None for a single file of another text.

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
    files = group(corpus, candidates)
    missing = [split for split in corpus.splits if not files[split]]
    if missing:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"--file is {listed}, without files of {', '.join(missing)}; allowed: {_allowed(corpus)}")
    if corpus.train_files is not None:
        files["train"] = files["train"][:shards]
    return files


def _allowed(corpus: Corpus) -> str:
    return f"files of {corpus.title}, whose paths match {corpus.pattern.pattern}, or a folder that holds them"


def group(corpus: Corpus, paths: Iterable[Path]) -> Files:
    """``paths`` by split."""
    files: Files = {split: [] for split in corpus.splits}
    for path in paths:
        files[corpus.split_of(path.absolute().as_posix())].append(path)
    return files


def check(corpus: Corpus, files: Files) -> None:
    """Compare the number of documents in the files with that of the corpus.

    Raises:
        ValueError: a split differs. C4's training split is compared only when all of it is used.
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
