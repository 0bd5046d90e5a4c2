"""``python -m recipes.papers``: every table and figure of the papers, and the commands of each row that has some.

``flowformer 4`` prints a table, ``flowformer 4 --row cosFormer`` the commands of one row, ``flowformer figure-8`` the
one that draws a figure. ``--write-readmes`` makes the tables of published numbers in the READMEs of the recipes anew.
"""

import sys
from collections.abc import Iterable

from common.command_parser import CommandParser

from ..shared.scripts import script
from . import report
from .entries import command_of, entries_of
from .readmes import write_readmes
from .tables import PAPERS, names_like, read_paper


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.papers", description=__doc__.split("\n")[0])
    parser.add_argument("paper", metavar="PAPER", nargs="?", type=str.lower, choices=PAPERS, help=", ".join(PAPERS))
    parser.add_argument("table", metavar="TABLE", nargs="?", help="as the list has it: 4, beside-figure-1, figure-8")
    parser.add_argument("--row", metavar="NAME", help="of the table: prints its commands")
    parser.add_argument("--write-readmes", action="store_true", help="make the tables in the recipes' READMEs anew")
    return parser


@script("papers")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status, 2 for a paper, table or row that is not there."""
    options = parser().parse_args(arguments)
    if options.write_readmes:
        if options.paper is not None:
            parser().error(f"--write-readmes is given with PAPER {options.paper}; allowed: alone")
        print("\n".join(map(str, write_readmes())))
        return 0
    if options.table is None:
        if options.row is not None:
            parser().error(f"--row is {options.row} without TABLE; allowed: with a paper and a table")
        papers = PAPERS if options.paper is None else [options.paper]
        print(report.list_papers(map(read_paper, papers)))
        return 0
    print(_shown(options.paper, options.table, options.row))
    return 0


def _shown(name: str, typed: str, row: str | None) -> str:
    """A table, a row or a figure."""
    paper, number = read_paper(name), typed.lower()
    figures = {report.key(figure): figure for figure in paper.figures.values()}
    if number in figures:
        if row is not None:
            parser().error(f"--row is {row} with {typed}; allowed: with a table")
        return report.show_figure(paper, figures[number], command_of(name, figures[number].number))
    if number not in paper.tables:
        parser().error(f"TABLE is {typed}; allowed for {name}: {', '.join([*paper.tables, *figures])}")
    table, entries = paper.tables[number], entries_of(name)[number]
    if row is None:
        return report.show_table(paper, table)
    found = names_like(entries, row)
    if len(found) != 1:
        parser().error(f"--row is {row}; allowed in Table {number} of {name}: {'; '.join(found or entries)}")
    return report.show_entry(paper, table, found[0], entries[found[0]])


if __name__ == "__main__":
    sys.exit(main())
