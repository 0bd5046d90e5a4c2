"""Download WikiText-103, check it and binarise it: ``python -m recipes.wikitext103.prepare`` from the checkout's root.

The address in most scripts, research.metamind.io on S3, has answered 403 since 2024; other sources are tried in turn.
``--file`` uses an archive or folder that you already have, or any text file to try the commands.
"""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared.commands import shown_path
from ..shared.download import DownloadFailed, fetch, first_source
from ..shared.hub import fetch_hub
from ..shared.scripts import positive_int, script
from ..shared.sources import HUB, SOURCES
from ..shared.split_text import SPLITS, WRITER, Counts, binarise, count, split_path, take_file, unpack
from ..shared.text_files import read_lines, write_lines
from ..shared.working_folder import working_folder

COMMAND = WRITER
#: Tokens from Merity et al. (2017), table 1; lines from torchtext's NUM_LINES.
EXPECTED = {
    "train": Counts(1_801_350, 103_227_021),
    "valid": Counts(3_760, 217_646),
    "test": Counts(4_358, 245_569),
}

#: Newer versions of pyarrow need numpy 2, with which fairseq fails.
_PYARROW = "reading it needs pyarrow: python -m pip install 'pyarrow<22' 'numpy<2'"

#: Split -> prefix of the names of its tables.
_TABLES = {"train": "train-", "valid": "validation-", "test": "test-"}


def fetch_text(folder: Path) -> None:
    """Download the three splits into ``folder`` from the first source that works.

    Raises:
        DownloadFailed: no source worked; the message lists all reasons.
    """
    sources = [partial(_fetch_zip, folder), partial(_fetch_parquet, folder)]
    first_source("WikiText-103", sources, "give a copy you have: --file wikitext-103-v1.zip")


def _fetch_zip(folder: Path) -> None:
    unpack(fetch(SOURCES["wikitext103"], folder), folder)


def _fetch_parquet(folder: Path) -> None:
    """Download the text as Parquet tables from the Hugging Face Hub; needs pyarrow."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DownloadFailed(f"{HUB['wikitext103'].dataset}: {_PYARROW}") from error
    paths = fetch_hub(HUB["wikitext103"], folder, list)
    for split, prefix in _TABLES.items():
        files = (parquet.ParquetFile(path) for path in paths if path.name.startswith(prefix))
        batches = (batch for file in files for batch in file.iter_batches(columns=["text"]))
        write_rows((row for batch in batches for row in batch.column(0).to_pylist()), split_path(folder, split))


def write_rows(rows: Iterable[str], path: Path) -> None:
    """Write a table's rows as the archive's lines: rows include their newline, but blank lines are empty rows."""
    write_lines(path, (row or " \n" for row in rows))


def check(folder: Path) -> None:
    """Compare the sizes of the three splits with those of WikiText-103.

    Raises:
        ValueError: a split differs.
    """
    for split in tqdm(SPLITS, desc="counting", unit=" splits", leave=False, disable=None):
        counts, expected = count(split_path(folder, split)), EXPECTED[split]
        if counts != expected:
            raise ValueError(
                f"{split_path(folder, split)} has {counts.lines:,} lines and {counts.tokens:,} tokens; allowed:"
                f" {expected.lines:,} and {expected.tokens:,}, which WikiText-103 has"
            )


def shorten(folder: Path, limit: int) -> None:
    """Keep the first ``limit`` lines of every split, for a trial."""
    for split in SPLITS:
        path = split_path(folder, split)
        write_lines(path, (line for _, line in zip(range(limit), read_lines(path), strict=False)))


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.wikitext103.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/wikitext103"), help="default: %(default)s")
    parser.add_argument("--file", type=Path, help="the zip or folder you have, or any text file for a trial")
    parser.add_argument("--limit", type=positive_int, metavar="LINES", help="for a trial: only the first lines")
    parser.add_argument("--workers", type=positive_int, default=2, help="processes of fairseq-preprocess")
    return parser


@script("prepare")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    text, data_bin = out / "text", out / "data-bin"
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        is_wikitext = True
        if options.file is not None:
            is_wikitext = take_file(options.file, text, options.limit)
        else:
            fetch_text(text)
        if is_wikitext:
            check(text)
            if options.limit is not None:
                shorten(text, options.limit)
        binarise(text, data_bin, options.workers)
    for split in SPLITS:
        counts = count(split_path(text, split))
        print(f"  {split:<5}  {counts.lines:9,d} lines  {counts.tokens:11,d} tokens")
    print(f"Ready: {shown_path(data_bin)}. The commands to train with are in recipes/wikitext103/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
