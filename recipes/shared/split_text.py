"""Any text, or WikiText-103, as a folder of three splits, and binarised for fairseq's language models."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common.files.output_files import new_folder

from .archives import extract
from .commands import python_command, run
from .sources import SOURCES
from .text_files import cut_text, read_lines, write_lines

#: The recorded writer of data-bin, also in comparisons.
WRITER = "recipes.wikitext103.prepare"
SPLITS = ("train", "valid", "test")


class Counts(NamedTuple):
    """Size of a split; a token is a word or the end of a line, as in the papers and in fairseq."""

    lines: int
    tokens: int


def split_path(folder: Path, split: str) -> Path:
    """The path of a split's text in ``folder``, named as in the archive."""
    return folder / f"wiki.{split}.tokens"


def unpack(archive: Path, folder: Path) -> None:
    """Extract the three splits of a zip archive into ``folder``; see ``extract``."""
    extract(archive, SOURCES["wikitext103"].members, folder, "wikitext-103-v1.zip (not the raw one)")


def take_file(path: Path, folder: Path, limit: int | None = None) -> bool:
    """Write the user's text at ``path`` to ``folder``; True if it has the form of WikiText-103.

    Args:
        path: the zip archive, a folder with its three files, or any text file, which is cut in three.
        limit: number of lines of a text file that are used, from the first one.

    Raises:
        ValueError: ``path`` is something else.
    """
    if not path.exists():
        raise ValueError(f"--file is {path}, which does not exist; allowed: a zip archive, a folder or a text file")
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        for split in SPLITS:
            source = next(iter(sorted(path.rglob(split_path(path, split).name))), None)
            if source is None:
                names = ", ".join(split_path(path, split).name for split in SPLITS)
                raise ValueError(f"--file is the folder {path}, without {names}; allowed: a folder that holds them")
            write_lines(split_path(folder, split), read_lines(source))
        return True
    if path.suffix == ".zip" or zipfile.is_zipfile(path):
        unpack(path, folder)
        return True
    cut_text(path, {split: split_path(folder, split) for split in SPLITS}, limit)
    return False


def count(path: Path) -> Counts:
    """Lines and tokens of a split's file."""
    lines = words = 0
    for line in read_lines(path):
        lines += 1
        words += len(line.split())
    return Counts(lines, words + lines)


def binarise(folder: Path, data_bin: Path, workers: int) -> None:
    """Run fairseq-preprocess on the three splits as fairseq's own recipe does: words by whitespace, no threshold."""
    texts = {split: split_path(folder, split) for split in SPLITS}
    preprocess(texts, data_bin, WRITER, folder / "preprocess.log", "--workers", workers)


def preprocess(
    texts: Mapping[str, Path],
    data_bin: Path,
    writer: str,
    log: Path,
    *options: object,
    languages: tuple[str, str] | None = None,
) -> None:
    """Run fairseq-preprocess on the text of each split, into a folder that appears when it is complete.

    Args:
        writer: the command that is recorded as the writer of ``data_bin``.
        options: more options of fairseq-preprocess.
        languages: source and target, the endings of two files of each split; None: one file without an ending.

    Raises:
        CommandFailed: fairseq-preprocess failed.
        ValueError: ``data_bin`` exists, and ``writer`` did not write it.
    """
    prefixes = (item for split, path in texts.items() for item in (f"--{split}pref", path))
    sides = ("--only-source",) if languages is None else ("--source-lang", languages[0], "--target-lang", languages[1])
    with new_folder(data_bin, writer) as new:
        command = ("-m", "fairseq_cli.preprocess", *sides, *prefixes, "--destdir", new, *options)
        run(python_command(*command), log)
