"""Download enwik8, check it and binarise it byte by byte: ``python -m recipes.enwik8.prepare``, from the checkout.

``--file`` uses enwik8, its zip archive, or any other file to try the commands.
"""

import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary
from tqdm import tqdm

from common.command_parser import CommandParser
from common.files.output_files import new_folder

from ..shared.archives import extract
from ..shared.commands import shown_path
from ..shared.download import Source, find_file
from ..shared.indexed_files import count_tokens, write_dictionary, write_split
from ..shared.scripts import positive_int, script
from ..shared.sources import SOURCES
from ..shared.text_files import TRIAL_PARTS
from ..shared.working_folder import working_folder

COMMAND = "recipes.enwik8.prepare"

#: The extracted file enwik8; size and md5 are from its publisher's page, http://mattmahoney.net/dc/textdata.html.
ENWIK8 = Source("enwik8", 100_000_000, md5="a1fa5ffddb56f4953e226637dabbb36a")
#: Bytes of each split, in this order.
SPLIT_BYTES = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}

_NEWLINE = ord("\n")
#: Longer lines are cut into sequences of this many bytes; the result is the same, since fairseq joins sequences.
_LONGEST_SEQUENCE = 1 << 16


def byte_dictionary() -> Dictionary:
    """fairseq dictionary with one symbol per byte, named by its value in decimal; the newline is fairseq's ``</s>``."""
    dictionary = Dictionary()
    for byte in range(256):
        if byte != _NEWLINE:
            dictionary.add_symbol(str(byte))
    return dictionary


def token_table(dictionary: Dictionary) -> np.ndarray:
    """The token of each byte (256,), int32."""
    return np.array(
        [dictionary.eos() if byte == _NEWLINE else dictionary.index(str(byte)) for byte in range(256)], dtype=np.int32
    )


def fetch_enwik8(folder: Path) -> Path:
    """Download enwik8 into ``folder`` and return the path of the file.

    Raises:
        DownloadFailed: the download failed or is incomplete.
        ValueError: the file in the archive is not enwik8.
    """
    path = folder / "enwik8"
    if not path.exists():
        _unpack(find_file(None, SOURCES["enwik8"], folder), folder)
    return _checked(path)


def _checked(path: Path) -> Path:
    if difference := ENWIK8.difference(path):
        raise ValueError(f"{path} {difference}, which enwik8 has")
    return path


def _unpack(archive: Path, folder: Path) -> None:
    extract(archive, SOURCES["enwik8"].members, folder, "enwik8.zip")


def take_file(path: Path, folder: Path) -> tuple[Path, bool]:
    """Return the user's file, unpacked if it is an archive, and whether it is enwik8.

    Args:
        path: enwik8, its zip archive, or any other file for a trial.
        folder: where an archive is unpacked to.

    Raises:
        ValueError: the file does not exist, or it has the name or size of enwik8 but different content.
    """
    if not path.is_file():
        raise ValueError(f"--file is {path}, which is no file; allowed: enwik8, its zip archive, or a text file")
    if path.suffix == ".zip" or zipfile.is_zipfile(path):
        _unpack(path, folder)
        path = folder / "enwik8"
    elif path.name != "enwik8" and path.stat().st_size != ENWIK8.size:
        return path, False
    return _checked(path), True


def cut(size: int) -> dict[str, int]:
    """Bytes of each split for a trial file of ``size`` bytes.

    Raises:
        ValueError: the file is too short.
    """
    least = round(1 / min(TRIAL_PARTS.values()))
    if size < least:
        raise ValueError(f"there are {size} bytes to use; allowed: at least {least}")
    held_out = {split: int(size * share) for split, share in TRIAL_PARTS.items() if split != "train"}
    return {"train": size - sum(held_out.values()), **held_out}


def binarise(path: Path, splits: dict[str, int], data_bin: Path) -> None:
    """Write the first bytes of ``path`` as a data set: one token per byte, one sequence per line.

    fairseq-preprocess does almost the same, but where a split ends inside a line it adds a ``</s>`` that corresponds to
    no byte.

    Raises:
        ValueError: a split has a different number of tokens than bytes.
    """
    dictionary = byte_dictionary()
    table = token_table(dictionary)
    with new_folder(data_bin, COMMAND) as folder, open(path, "rb") as file:
        write_dictionary(folder, dictionary)
        with tqdm(total=sum(splits.values()), unit="B", unit_scale=True, desc="binarising", disable=None) as bar:
            for split, size in splits.items():
                lines = read_lines(file, size, bar.update)
                write_split(folder, split, (table[np.frombuffer(line, np.uint8)] for line in lines), len(dictionary))
        for split, size in splits.items():
            tokens = count_tokens(folder, split)
            if tokens != size:
                raise ValueError(f"{path}: {split} became {tokens:,} tokens; allowed: {size:,}, its bytes")


def read_lines(file, size: int, on_bytes: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the next ``size`` bytes of a binary file as lines with their newlines; very long lines are cut."""
    while size and (line := file.readline(min(size, _LONGEST_SEQUENCE))):
        size -= len(line)
        on_bytes(len(line))
        yield line


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.enwik8.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/enwik8"), help="default: %(default)s")
    parser.add_argument("--file", type=Path, help="enwik8 or its zip archive, or any text file for a trial")
    parser.add_argument(
        "--limit",
        type=positive_int,
        metavar="BYTES",
        help="for a trial: only the first bytes, cut 90, 5 and 5 per cent",
    )
    return parser


@script("prepare")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={"data-bin": COMMAND}):
        path, genuine = (fetch_enwik8(out), True) if options.file is None else take_file(options.file, out)
        splits = SPLIT_BYTES if genuine and options.limit is None else cut(_usable(path, options.limit))
        binarise(path, splits, out / "data-bin")
    for split, size in splits.items():
        print(f"  {split:<5}  {size:11,d} bytes  {count_tokens(out / 'data-bin', split):11,d} tokens")
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/enwik8/README.md.")
    return 0


def _usable(path: Path, limit: int | None) -> int:
    size = path.stat().st_size
    return size if limit is None else min(size, limit)


if __name__ == "__main__":
    sys.exit(main())
