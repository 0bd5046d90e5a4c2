"""Documents as a data-bin of subwords: learned, encoded and binarised, each step once for the same files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
from tqdm import tqdm

from .commands import shown_path
from .documents import LINES_SUFFIX, read_all
from .download import file_sha256
from .json_files import read_json, write_json
from .split_text import preprocess
from .subword_text import SplitCounts, encode, train_sentencepiece, write_dictionary
from .text_files import cut_text
from .working_folder import remove_own

#: The files of each split.
Files = dict[str, list[Path]]
#: The command that writes data-bin folders, in comparisons too.
WRITER = "recipes.flash.prepare"
#: The subwords are learned on files of about this total size, chosen evenly if there are more.
LEARN_BYTES = 4 << 30


class Settings(NamedTuple):
    """How documents become a data-bin."""

    vocabulary: int  # rows of the embedding
    masked: bool = False  # reserves a row for <mask>
    limit: int | None = None  # documents of each split
    workers: int = 1
    documents: dict[str, int] = {}  # expected number in each split, for the progress bars


def cut_trial(path: Path, raw: Path, limit: int | None) -> Files:
    """Cut a user's text into three files of lines.

    Raises:
        ValueError: the text cannot be cut.
    """
    targets = {split: raw / f"{split}{LINES_SUFFIX}" for split in ("train", "valid", "test")}
    raw.mkdir(parents=True, exist_ok=True)
    once(targets["test"], {"file": describe([path]), "limit": limit}, lambda: cut_text(path, targets, limit))
    return {split: [target] for split, target in targets.items()}


def learn_subwords(files: Files, path: Path, settings: Settings) -> None:
    """Train a sentencepiece model on the training split alone and write it to ``path``."""
    documents = read_all(evenly_chosen(files["train"]), settings.limit)
    documents = tqdm(documents, desc="learning", unit=" documents", leave=False, disable=None)
    lines = (line for document in documents for line in document)
    train_sentencepiece(lines, path, settings.vocabulary, settings.masked, settings.workers)


def evenly_chosen(paths: list[Path]) -> list[Path]:
    """Every n-th of ``paths``, so that their total size is at most about ``LEARN_BYTES``."""
    total = sum(path.stat().st_size for path in paths)
    return paths[:: -(-total // LEARN_BYTES) or 1]


def once(path: Path, key: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Return the result of ``make``, which writes ``path``; it is not called again for the same ``key``."""
    record = path.with_name(path.name + ".json")
    if path.exists() and record.exists():
        stored = read_json(record, key=dict, found=Any)
        if stored["key"] == key:
            print(f"  {shown_path(path)} is up to date", flush=True)
            return stored["found"]
    remove_own(record)
    result = make()
    write_json(record, {"key": key, "found": result})
    return result


def describe(paths: list[Path]) -> list[list]:
    """Name, size and modification time of each file, to detect a change without reading it."""
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def to_data_bin(files: Files, out: Path, settings: Settings) -> dict[str, SplitCounts]:
    """Learn subwords, encode the splits and binarise them into ``out``/data-bin; returns the size of each split.

    Raises:
        CommandFailed, ValueError: see the functions above.
    """
    subwords = out / "sentencepiece.model"
    key = {"vocabulary": settings.vocabulary, "masked": settings.masked, "limit": settings.limit}
    once(subwords, {**key, "files": describe(files["train"])}, partial(learn_subwords, files, subwords, settings))
    model = sentencepiece.SentencePieceProcessor(model_file=str(subwords))
    write_dictionary(model, out / "dict.txt")
    counts, keys = {}, {}
    for split, paths in files.items():
        text = out / "pieces" / f"{split}.txt"
        keys[split] = {"limit": settings.limit, "model": file_sha256(subwords), "files": describe(paths)}
        total = settings.limit or settings.documents.get(split)
        make = partial(encode, read_all(paths, settings.limit), model, text, settings.workers, total)
        counts[split] = SplitCounts(*once(text, keys[split], make))
        if counts[split].tokens == 0:
            raise ValueError(f"the split {split} is empty; allowed: at least one line of text")
    texts = {split: out / "pieces" / f"{split}.txt" for split in files}
    data_bin = out / "data-bin"
    options = ("--srcdict", out / "dict.txt", "--workers", settings.workers)
    once(data_bin, keys, partial(preprocess, texts, data_bin, WRITER, out / "preprocess.log", *options))
    return counts
