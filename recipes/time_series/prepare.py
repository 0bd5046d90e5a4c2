"""Prepare a data set of time series for fairseq: ``python -m recipes.time_series.prepare --dataset JapaneseVowels``.

JapaneseVowels and BasicMotions come with sktime, the others are downloaded. ``--file`` uses a zip or ``.ts`` files of
any data set that you already have.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from common.command_parser import CommandParser
from common.files.output_files import new_folder
from fairseq_plugin.data.series_folder import Description, Split, write_folder

from ..shared.commands import shown_path
from ..shared.scripts import script
from .archives import ARCHIVES, read_archive

COMMAND = "recipes.time_series.prepare"


def prepare(name: str, out: Path, file: Path | None = None) -> tuple[Description, dict[str, Split]]:
    """Write data set ``name`` to the folder ``out``; downloads are kept next to it.

    Raises:
        ValueError: the name or the file is invalid, or ``out`` contains files that this function did not write; nothing
            is written then.
        DownloadFailed: the download failed or is incomplete.
    """
    with new_folder(out, COMMAND) as folder:
        splits = read_archive(name, out.parent / "downloads", file)
        description = write_folder(folder, splits)
    return description, splits


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.time_series.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, metavar="NAME", help=f"{', '.join(ARCHIVES)}; or any with --file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: work/time_series/NAME")
    parser.add_argument("--file", type=Path, metavar="ZIP_OR_TS", help="NAME.zip you have, or NAME_TRAIN.ts")
    return parser


@script("prepare")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = (options.out or Path("work/time_series") / options.dataset).absolute()
    described, splits = prepare(options.dataset, out, options.file)
    for name, split in splits.items():
        lengths = [len(values) for values in split.series]
        print(f"  {name:<5}  {len(lengths):5,d} series of {min(lengths)} to {max(lengths)} steps")
    print(f"  {described.channels} channels, {len(described.labels)} labels: {', '.join(map(str, described.labels))}")
    print(f"Ready: {shown_path(out)}. The commands to train with are in recipes/time_series/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
