"""Train all rows of a table as small language models with one budget, and show their order beside the published one.

``python -m recipes.papers.compare flash 1 --file any.txt`` from the checkout's root, through fairseq-train. Run again,
it goes on where it was interrupted.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

from common.command_parser import CommandParser

from ..shared import comparison
from ..shared import unported as language_models
from ..shared.comparison import MINUTES, PARAMETERS, PEAK, SEEDS, Column, Report
from ..shared.scripts import script
from ..shared.tables import spread
from ..shared.unported import Result
from .entries import entries_of
from .measured import said_of_order
from .report import names_like
from .small import COMMAND, FOLDER, TABLES, TablePlan, folder, refusal, trained_rows
from .tables import PAPERS, read_paper
from .trainings import NotTrained

UPDATES, EVALUATIONS = 300, 2
_LIMITS = (
    "{unit} after {updates:,} updates of a model of width {width}: what is learned first, by a fraction of the paper's "
    "sizes, data and budgets; rows nearer to each other than their deviations have no order."
)


def parser() -> CommandParser:
    """The script's options."""
    parser = language_models.parser(COMMAND, __doc__.splitlines()[0], updates=UPDATES)
    parser.add_argument("paper", metavar="PAPER", type=str.lower, choices=PAPERS, help=", ".join(PAPERS))
    parser.add_argument("table", metavar="TABLE", help="as python -m recipes.papers lists them")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="of the table; default: all that are models here")
    parser.add_argument("--masked", action="store_true", help="FLASH's masked models, not the causal ones")
    sizes = {"width": 64, "heads": 4, "batch_tokens": 2048, "tokens_per_sample": 128}
    parser.set_defaults(out=FOLDER, **sizes)
    return parser


@script("compare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status, 2 for a table or row that is not there."""
    options = parser().parse_args(arguments)
    options.table = options.table.lower()
    check_table(options)
    options.models = chosen_rows(options)
    options.out = folder(options.out, options.paper, options.table, *["masked"] * options.masked)
    return language_models.compare(options, TablePlan, COMMAND, arguments, EVALUATIONS, report)


def check_table(options: argparse.Namespace) -> None:
    """End with an error unless the rows of the table are language models, and masked ones where these are asked for."""
    paper, table = options.paper, options.table
    if (paper, table) not in TABLES:
        parser().error(refusal(TABLES, paper, table))
    if options.masked and not TABLES[paper, table].masked:
        masked = ", ".join(" ".join(named) for named, compared in TABLES.items() if compared.masked)
        parser().error(f"--masked is given with {paper} {table}; allowed: {masked}")


def chosen_rows(options: argparse.Namespace) -> list[str]:
    """The rows that are asked for, in the published order; ends with an error for one that is no model here."""
    entries = entries_of(options.paper)[options.table]
    known = trained_rows(options.paper, options.table, options.masked)
    if options.rows is None:
        return known
    chosen = set()
    for asked in options.rows:
        found = names_like(entries, asked)
        if len(found) != 1:
            parser().error(f"--rows has {asked}; allowed: {'; '.join(found or known)}")
        if isinstance(entries[found[0]], NotTrained):
            parser().error(f"--rows has {asked}: {entries[found[0]].reason}; allowed: {'; '.join(known)}")
        chosen.add(found[0])
    return [row for row in known if row in chosen]


def report(plan: TablePlan, tokens: dict[str, int], unit: str, compared: comparison.Compared) -> Report:
    """A table with a row for each row of the published one, best first there, and what the order says."""
    bits, published = plan.values.bits, plan.published_cells()
    what = "bits per token" if bits else "perplexity"

    def measured(outcomes: Sequence[Result]) -> str:
        return spread([math.log2(one.perplexity) if bits else one.perplexity for one in outcomes], 3 if bits else 2)

    columns = [
        Column(f"Table {plan.table} of {plan.paper}", known=str),
        PARAMETERS,
        Column(what, measured),
        Column("published", known=published.__getitem__),
        SEEDS,
        Column("tokens/s", lambda ours: f"{statistics.median(one.tokens_per_second for one in ours):,.0f}"),
        PEAK,
        MINUTES,
    ]
    found = comparison.by_model(compared.outcomes, plan.models)
    cells = {row: measured(outcomes) for row, outcomes in found.items()}
    limits = _LIMITS.format(unit=unit.capitalize(), updates=plan.updates, width=plan.width)
    described = (
        f"{plan.depth} of width {plan.width}, {plan.updates:,} updates of {plan.batch_tokens:,} {unit} in "
        f"sequences of {plan.tokens_per_sample:,}, {sum(tokens.values()) / 1e6:.1f} million in all; test {what}, "
        f"{plan.seeds} seed{'s' * (plan.seeds > 1)}"
    )
    notes = [
        f"{what} of the test text, mean ± standard deviation over seeds; the valid text selects the checkpoint",
        f"{'masked' if plan.masked else 'causal'} models: {described}, highest learning rate {plan.lr:g} for all",
        "tokens per second in training, and the largest memory of the process: on one thread, with whatever else ran",
        *(f"not run: {row}: {reason}" for row, reason in plan.not_run().items()),
        said_of_order(cells, published),
        limits,
    ]
    content = {
        "plan": plan.as_dict(),
        "tokens": tokens,
        "unit": unit,
        "results": [one._asdict() for one in compared.outcomes],
        "failed": compared.failed,
        "measured": {
            "what": described,
            "cells": cells,
            "column": plan.values.column,
            "limits": limits,
            "higher_is_better": False,
            "part": int(plan.masked),
        },
    }
    title = read_paper(plan.paper).tables[plan.table].title
    shown = comparison.table(title, columns, plan.models, compared, notes)
    return Report([shown], content, None)


if __name__ == "__main__":
    sys.exit(main())
