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
            titles = [f"  {number:16} {text.splitlines()[0]}" for number, text in sections(paper).items()]
            print(f"{paper}:", *titles, sep="\n")
        return
    text, tables = sections(options.paper).get(options.table), groups(options.paper).get(options.table, [])
    if text is None:
        parser.error(f"TABLE is {options.table}; allowed: {', '.join(sections(options.paper))}")
    if options.row is None:
        print(f"## {text}")
    else:
        names = [row for group in tables for row in group["rows"]]
        chosen = match(options.row, names)
        if len(chosen) != 1:
            parser.error(f"--row is {options.row}; allowed: {'; '.join(chosen or names)}")
        tables = [group for group in tables if chosen[0] in group["rows"]]
    for group in tables:
        for row, commands in group["rows"].items():
            if options.row is None:
                print(f"\n{row}:", *commands, sep="\n")
            elif row == chosen[0]:
                print(*commands, sep="\n")
        if "note" in group:
            print("\n#", group["note"].replace("; ", "\n# "))
        if "small" in group:
            print(f"# all rows in small: {group['small']}")


if __name__ == "__main__":
    main()
