"""Write scikit-learn's handwritten digits as a folder of images: ``python -m recipes.demo.write_digits --out DIR``."""

import sys
from pathlib import Path

from common.command_parser import CommandParser
from common.files.output_files import new_folder

from ..shared.commands import shown_path
from ..shared.digits import write_digits
from ..shared.scripts import script

COMMAND = "recipes.demo.write_digits"


def parser() -> CommandParser:
    """The command's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.split(":")[0])
    parser.add_argument("--out", type=Path, default=Path("work/digits"), help="new folder (default: %(default)s)")
    return parser


@script("write_digits")
def main(arguments: list[str] | None = None) -> int:
    """Write train/ and validation/, each with a folder of images for every digit; returns 0."""
    out = parser().parse_args(arguments).out.absolute()
    with new_folder(out, COMMAND) as unfinished:
        written = write_digits(unfinished)
    print(f"{written['train']} digits to learn from and {written['validation']} held out are in {shown_path(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
