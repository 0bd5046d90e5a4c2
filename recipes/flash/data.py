"""Write one of the paper's corpora as 32,000 subwords for fairseq: ``python -m recipes.flash.data wiki40b``.

``--file`` takes the files that you have. Any other text: ``python -m recipes.prepare_text subwords --file any.txt``.
"""

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .. import texts

#: The subwords are learned on files of about this total size, chosen evenly if there are more.
_LEARN_BYTES = 4 << 30


class Corpus(NamedTuple):
    """A data set on the Hugging Face Hub: split -> a pattern of its files, and its documents."""

    dataset: str
    revision: str
    files: dict[str, str]
    documents: dict[str, int]


def _parquet(folder: str) -> dict[str, str]:
    return {x: f"{folder}/{y}-*.parquet" for x, y in {"train": "train", "valid": "validation", "test": "test"}.items()}


CORPORA = {
    "wiki40b": Corpus(
        *("google/wiki40b", "06bfe584d8193cf58f79c6354ecc2a2b94a7deea", _parquet("en")),
        {"train": 2_926_536, "valid": 163_597, "test": 162_274},
    ),
    "pg19": Corpus(
        *("emozilla/pg19", "b7bca68072ef1d86348f080bbda0996648d94315", _parquet("data")),
        {"train": 28_602, "valid": 50, "test": 100},
    ),
    "c4": Corpus(
        *("allenai/c4", "1ddc917116b730e1859edef32896ec5c16be51d0"),
        {"train": "en/c4-train.*.json.gz", "valid": "en/c4-validation.*.json.gz"},
        {"train": 364_868_892, "valid": 364_608},
    ),
}
#: Training files of C4; 256 are enough for the paper's 125,000 updates of 2^18 tokens without repeating text.
_C4_FILES, _C4_USED = 1024, 256


def files_of(corpus: str, folder: Path | None, out: Path, shards: int) -> dict[str, list[Path]]:
    """The files of each split, of the user's folder or else downloaded; of C4 the first ``shards`` for training."""
    described, files = CORPORA[corpus], {}
    for split, pattern in described.files.items():
        if folder is not None:
            books = {"train": "train", "valid": "validation", "test": "test"}[split]  # of PG-19's publisher
            files[split] = sorted(folder.rglob(pattern.rpartition("/")[2])) or sorted(folder.rglob(f"{books}/*.txt"))
        else:
            part = corpus == "c4" and split == "train"
            names = [f"en/c4-train.{i:05d}-of-{_C4_FILES:05d}.json.gz" for i in range(shards)] if part else [pattern]
            files[split] = texts.hub_files(described.dataset, described.revision, names, out / "raw")
        if not files[split]:
            raise SystemExit(f"{folder or described.dataset} has no {pattern.rpartition('/')[2]}")
    if corpus == "c4":
        files["train"] = files["train"][:shards]
    return files


def read(paths: list[Path], limit: int | None) -> Iterator[list[str]]:
    """The documents of files as paragraphs, at most ``limit``."""
    documents = (document for path in paths for document in texts.read_documents(path))
    return map(texts.paragraphs, itertools.islice(documents, limit))


def main() -> None:
    """Write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("--out", type=Path, help="default: work/flash/CORPUS")
    parser.add_argument("--file", type=Path, metavar="FOLDER", help="that holds the files you have, as on the hub")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="rows of the embedding")
    parser.add_argument("--shards", type=int, default=_C4_USED, help=f"training files of C4, of {_C4_FILES}")
    parser.add_argument("--limit", type=int, metavar="N", help="for a trial: only the first documents of each split")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes and threads")
    options = parser.parse_args()
    corpus, out = CORPORA[options.corpus], options.out or Path("work/flash") / options.corpus
    files = files_of(options.corpus, options.file, out, options.shards)
    every = -(-sum(path.stat().st_size for path in files["train"]) // _LEARN_BYTES) or 1
    counts = texts.subword_data(
        {split: lambda paths=paths: read(paths, options.limit) for split, paths in files.items()},
        out,
        options.vocabulary,
        masked=options.corpus == "c4",
        workers=options.workers,
        learned_from=lambda: read(files["train"][::every], options.limit),
        **{"corpus": options.corpus, "limit": options.limit, "shards": len(files["train"])},
    )
    for split, count in counts.items():
        print(f"{split}: {count.documents:,} documents, {count.words:,} words, {count.tokens:,} tokens")
        print(f"  {count.tokens / count.words:.4f} tokens a word")
        part = options.limit or (options.corpus == "c4" and split == "train" and len(files[split]) < _C4_FILES)
        if not part and count.documents != corpus.documents[split]:
            raise SystemExit(
                f"{split} has {count.documents:,} documents; {options.corpus} has {corpus.documents[split]:,}"
            )


if __name__ == "__main__":
    main()
