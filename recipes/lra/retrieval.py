"""Write Retrieval, pairs of papers as bytes: ``python -m recipes.lra.retrieval`` from the checkout's root.

The label says whether one paper of the ACL Anthology Network cites the other. The release has 147,086, 18,090 and
17,437 pairs. Without ``--file`` the whole release is downloaded, 8.2 GB.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from common.command_parser import CommandParser
from fairseq_plugin.data.pixels import pixel_dictionary

from ..shared.commands import shown_path
from ..shared.scripts import positive_int, script
from ..shared.working_folder import working_folder
from .byte_text import to_tokens
from .examples import WRITER, Example, write_examples
from .release import find_one, find_release
from .tables import read_cells

COMMAND = "recipes.lra.retrieval"
#: The tables of the release.
RELEASED = {"train": "new_aan_pairs.train.tsv", "valid": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
COLUMNS = ("label", "id1", "id2", "text1", "text2")
LABELS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}
#: Bytes of a document in the Arena's configurations.
LONGEST = 4_000


def examples(path: Path, longest: int) -> Iterator[Example]:
    """Yield the pairs of a table, with the first ``longest`` bytes of each text.

    Raises:
        ValueError: a line has wrong columns, a wrong label or an empty text, is cut off, or is not UTF-8.
    """
    for location, cells in read_cells(path):
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{location} has {len(cells)} columns; allowed: {len(COLUMNS)}, {', '.join(COLUMNS)}")
        if cells[0] not in LABELS:
            raise ValueError(f"{location} has the label {cells[0]!r}; allowed: {', '.join(LABELS)}")
        first, second = (to_tokens(text.encode(), longest, location) for text in cells[3:])
        yield Example((first, second), LABELS[cells[0]])


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.retrieval", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/lra/retrieval"), help="default: %(default)s")
    parser.add_argument("--file", type=Path, help="lra_release.gz, or a folder with the tables of its tsv_data")
    parser.add_argument("--max-length", type=positive_int, default=LONGEST, help="bytes of a document (%(default)s)")
    return parser


@script("retrieval")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        write(options.file, out, options.max_length)
    return 0


def write(file: Path | None, out: Path, longest: int) -> None:
    """Write ``out``/data-bin from the release ``file``, or from its download."""
    names = tuple(RELEASED.values())
    folder = find_release(file, out, lambda member: member.endswith(names), "tables of pairs of papers")
    paths = {split: find_one(folder, name) for split, name in RELEASED.items()}
    splits = {split: examples(path, longest) for split, path in paths.items()}
    counts = write_examples(out / "data-bin", splits, pixel_dictionary(), len(set(LABELS.values())), inputs=2)
    for name, count in counts.items():
        tqdm.write(f"  {name:<5}  {count:7,d} pairs")
    print(f"Ready: {shown_path(out / 'data-bin')}. The commands to train with are in recipes/lra/README.md.")


if __name__ == "__main__":
    sys.exit(main())
