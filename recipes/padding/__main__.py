"""``python -m recipes.padding [--out DIR]``: measure leaks here and in the public packages that are installed.

Less than a minute on one core.
"""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared.scripts import command_line, script
from ..shared.tables import MISSING, Table, as_markdown, as_text, describe_run
from ..shared.working_folder import working_folder, write_text
from .measure import BATCH, CHANNELS, HEADS, PADDED, REAL, Attend, Changes, measure
from .ours import OPTIONS, forms, ours
from .peers import PEERS, Missing

COMMAND = "recipes.padding"
#: Smaller changes count as rounding; this is the tests' tolerance for float32.
ROUNDING = 1e-5
_TITLE = "Relative change of the outputs of real tokens"
_HEADER = (
    "mechanism",
    "version",
    "causal",
    "padding's content",
    "padding on the right",
    "padding on the left",
    "later tokens",
    "batch neighbour",
    "note",
)
_NOTES = [
    f"{BATCH} sequences of {REAL} real tokens beside {PADDED} of padding, {HEADS} heads of {CHANNELS} channels, random "
    "vectors and weights, float32.",
    f"0 is a change below {ROUNDING:g}, which is rounding; {MISSING} does not apply, or was not measured.",
]


def rows() -> Iterable[tuple[str, ...]]:
    """Yield one row for each form of each version: our version of a mechanism, then the public ones."""
    for name in tqdm(OPTIONS, desc="mechanisms", unit="", leave=False, disable=None):
        yield from _rows(name, "lineartime", lambda name=name: ours(name), forms(name), "")
        for peer in (peer for peer in PEERS if peer.mechanism == name):
            yield from _rows(name, peer.title, peer.load, peer.forms, peer.note)


def cells(changes: Changes | None) -> list[str]:
    """The formatted numbers of a row; None for a row that was not measured."""
    values = changes or [None] * len(Changes._fields)
    return [
        MISSING if value is None else "0" if value < ROUNDING else f"{value:.1g}" if value < 0.01 else f"{value:.2f}"
        for value in values
    ]


def _rows(
    mechanism: str, version: str, load: Callable[[], Attend], causal: Iterable[bool], note: str
) -> Iterable[tuple[str, ...]]:
    try:
        attend = load()
    except Missing as error:
        yield (f"`{mechanism}`", version, MISSING, *cells(None), str(error))
        return
    for form in causal:
        yield (f"`{mechanism}`", version, "yes" if form else "no", *cells(measure(attend, form)), note)


@script("python -m recipes.padding")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    parser = CommandParser(prog="python -m recipes.padding", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("work/padding"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started, command = time.monotonic(), command_line(COMMAND, arguments)
    with working_folder(options.out, COMMAND):
        blocks = [Table(_TITLE, _HEADER, list(rows()), _NOTES)]
        run = describe_run(command, time.monotonic() - started)
        write_text(options.out / "results.md", as_markdown(blocks, run) + "\n")
    print(as_text(blocks, run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
