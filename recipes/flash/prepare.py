"""Get one of the paper's corpora as 32,000 subwords, binarised: ``python -m recipes.flash.prepare wiki40b``.

Run it from the checkout's root. ``--file`` accepts the files or the folder you have, or any text file for a trial of
the commands. Finished steps are not repeated.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
from tqdm import tqdm

from common.command_parser import CommandParser
from common.files.output_files import new_folder

from ..shared.commands import python_command, run, shown_path
from ..shared.download import file_sha256
from ..shared.json_files import read_json, write_json
from ..shared.scripts import positive_int, script
from ..shared.subword_text import SplitCounts, encode, train_sentencepiece
from ..shared.subwords import write_dictionary
from ..shared.text_files import cut_text
from ..shared.working_folder import remove_own, working_folder
from .corpora import CORPORA, Corpus, Files, check, fetch_corpus, find_corpus
from .documents import LINES_SUFFIX, read_all

COMMAND = "recipes.flash.prepare"
#: The command that owns the folders data-bin, also in comparisons that use this module.
WRITER = COMMAND
#: Enough for the paper's 125,000 updates of 2^18 tokens without repeating text; see README.md.
C4_SHARDS = 256
#: The subwords are learned on files of about this total size, chosen evenly if there are more.
LEARN_BYTES = 4 << 30


class Settings(NamedTuple):
    """How documents become a data-bin."""

    vocabulary: int  # rows of the embedding
    masked: bool = False  # reserves a row for <mask>
    limit: int | None = None  # documents of each split
    workers: int = 1
    documents: dict[str, int] = {}  # expected number in each split, for the progress bars


def get_files(options: argparse.Namespace, corpus: Corpus, out: Path) -> tuple[Files, bool]:
    """The files of each split, and whether they are the corpus rather than a text for a trial.

    Raises:
        DownloadFailed: no source has the corpus.
        ValueError: ``--file`` is not usable, or the corpus is incomplete.
    """
    if not options.file:
        files = fetch_corpus(corpus, out / "raw", options.shards)
    else:
        files = find_corpus(corpus, options.file, options.shards)
    if files is None:
        return cut_trial(options.file[0], out / "raw", options.limit), False
    check(corpus, files)
    return files, True


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
    documents = tqdm(
        read_all(spread(files["train"]), settings.limit), desc="learning", unit=" documents", leave=False, disable=None
    )
    lines = (line for document in documents for line in document)
    train_sentencepiece(lines, path, settings.vocabulary, settings.masked, settings.workers)


def spread(paths: list[Path]) -> list[Path]:
    """Every n-th of ``paths``, so that their total size is at most about ``LEARN_BYTES``."""
    total = sum(path.stat().st_size for path in paths)
    return paths[:: -(-total // LEARN_BYTES) or 1]


def binarise(texts: dict[str, Path], dictionary: Path, data_bin: Path, workers: int) -> None:
    """Run fairseq-preprocess on the splits, into a folder that appears when it is complete."""
    prefixes = (item for split, path in texts.items() for item in (f"--{split}pref", path))
    command = python_command("-m", "fairseq_cli.preprocess", "--only-source", "--srcdict", dictionary, *prefixes)
    with new_folder(data_bin, WRITER) as new:
        log = data_bin.parent / "preprocess.log"
        run([*command, "--destdir", shown_path(new), "--workers", str(workers)], log)


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


def write_manifest(path: Path, files: Files, subwords: Path, counts: dict[str, SplitCounts], settings: dict) -> None:
    """Record the files and settings behind the data, with checksums, to compare the data of several machines."""
    bar = tqdm(total=sum(map(len, files.values())), desc="checksums", unit=" files", leave=False, disable=None)

    def checksums(paths: list[Path]) -> Iterator[dict]:
        for file in paths:
            yield {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file)}
            bar.update()

    with bar:
        manifest = {
            **settings,
            "sentencepiece_sha256": file_sha256(subwords),
            "splits": {
                split: {**count._asdict(), "tokens_per_word": round(count.tokens_per_word, 6)}
                for split, count in counts.items()
            },
            "files": {split: list(checksums(paths)) for split, paths in files.items()},
        }
    write_json(path, manifest)


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
    once(data_bin, keys, partial(binarise, texts, out / "dict.txt", data_bin, settings.workers))
    return counts


def prepare(options: argparse.Namespace) -> dict[str, SplitCounts]:
    """Run all steps, from the files to the data-bin; returns the size of each split.

    Raises:
        CommandFailed, DownloadFailed, ValueError: see the functions above.
    """
    corpus, out = CORPORA[options.corpus], options.out.absolute()
    files, genuine = get_files(options, corpus, out)
    documents = corpus.documents if genuine else {}
    settings = Settings(options.vocabulary, corpus.masked, options.limit, options.workers, documents)
    counts = to_data_bin(files, out, settings)
    about = {"corpus": options.corpus, "genuine": genuine, "vocabulary": options.vocabulary, "limit": options.limit}
    write_manifest(out / "manifest.json", files, out / "sentencepiece.model", counts, about)
    return counts


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.flash.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("corpus", choices=CORPORA, help="which of the paper's corpora")
    parser.add_argument("--out", type=Path, help="default: work/flash/CORPUS")
    parser.add_argument(
        "--file",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="the folder or files you have, or any text file for a trial",
    )
    parser.add_argument("--vocabulary", type=positive_int, default=32_000, help="rows of the embedding (%(default)s)")
    parser.add_argument(
        "--shards", type=positive_int, default=C4_SHARDS, help="training files of C4 (%(default)s of 1024)"
    )
    parser.add_argument(
        "--limit", type=positive_int, metavar="N", help="for a trial: only the first documents of each split, or lines"
    )
    parser.add_argument("--workers", type=positive_int, default=os.cpu_count() or 1, help="processes and threads")
    return parser


@script("prepare")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    options.out = options.out or Path("work/flash") / options.corpus
    with working_folder(options.out, COMMAND, whole={"data-bin": WRITER}):
        counts = prepare(options)
    for split, count in counts.items():
        print(
            f"  {split:<5}  {count.documents:11,d} documents  {count.words:14,d} words  {count.tokens:14,d} tokens"
            f"  {count.tokens_per_word:.4f} tokens a word"
        )
    print(f"Ready: {shown_path(options.out / 'data-bin')}. The commands to train with are in recipes/flash/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
