"""The tables of the papers as printed, and the commands of their rows: ``python -m recipes.papers flowformer 4``.

``--row cosFormer`` prints the commands of one row, or of a column where columns are models. PAPER.md has the tables,
PAPER.yaml the commands.
"""

import argparse
from collections.abc import Sequence

from .rows import PAPERS, groups, match, sections


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of the papers, a table with its commands, or the commands of a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paper", nargs="?", type=str.lower, choices=PAPERS, help=", ".join(PAPERS))
    parser.add_argument("table", nargs="?", type=str.lower, help="as the list has it: 4, beside-figure-1, figures")
    parser.add_argument("--row", metavar="NAME", help="of the table, or a column, or the number of a figure")
    options = parser.parse_args(arguments)
    if options.table is None:
        for paper in [options.paper] if options.paper else PAPERS:
            print(
                f"{paper}:",
                *(f"  {number:16} {text.splitlines()[0]}" for number, text in sections(paper).items()),
                sep="\n",
            )
        return
    text, tables = sections(options.paper).get(options.table), groups(options.paper).get(options.table, [])
    if text is None:
        parser.error(f"TABLE is {options.table}; allowed: {', '.join(sections(options.paper))}")
    names = {name: group for group in tables for name in {**group["rows"], **group["notes"]}}
    chosen = names if options.row is None else match(options.row, names)
    if options.row is not None and len(chosen) != 1:
        parser.error(f"--row is {options.row}; allowed: {'; '.join(chosen or names)}")
    if options.row is None:
        print(f"## {text}")
    for name in chosen:
        if options.row is None:
            print(f"\n{name}:")
        print(*names[name]["rows"].get(name, []), sep="\n")
        if note := names[name]["notes"].get(name):
            print(f"# {note}")
    for group in tables if options.row is None else [names[chosen[0]]]:
        if "note" in group:
            print(f"\n# {group['note']}")
        if "small" in group:
            print(f"# all rows in small: {group['small']}")


if __name__ == "__main__":
    main()
