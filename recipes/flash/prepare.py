"""Get one of the paper's corpora as 32,000 subwords, binarised: ``python -m recipes.flash.prepare wiki40b``.

Run it from the checkout's root. ``--file`` accepts the files or the folder you have, or any text file for a trial of
the commands. Finished steps are not repeated.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared.commands import shown_path
from ..shared.download import file_sha256
from ..shared.json_files import write_json
from ..shared.scripts import positive_int, script
from ..shared.subword_data import WRITER, Files, Settings, cut_trial, to_data_bin
from ..shared.subword_text import SplitCounts
from ..shared.working_folder import working_folder
from .corpora import CORPORA, Corpus, check, fetch_corpus, find_corpus

COMMAND = WRITER
#: Enough for the paper's 125,000 updates of 2^18 tokens without repeating text; see README.md.
C4_SHARDS = 256


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
