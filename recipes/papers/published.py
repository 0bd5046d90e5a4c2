"""Printed numbers, and the order of models beside the printed one."""

import pandas as pd
from scipy.stats import kendalltau

from ..runs import published


def printed(paper: str, number: str, row: str, column: str) -> str:
    """A cell of a table as printed: ``row`` is as in PAPER.yaml, and the column's header begins with ``column``."""
    cells = published(paper, number)
    name, *conditions = row.split(", ")  # as in "DAFT-conv, Heads 16"
    rows = [place for place, printed_name in enumerate(cells.index) if printed_name.startswith(row)]
    if not rows:
        by_column = [condition.rpartition(" ") for condition in conditions]
        rows = [
            place
            for place, printed_name in enumerate(cells.index)
            if printed_name == name and all(cells[header].iloc[place] == value for header, _, value in by_column)
        ]
    header = next(header for header in cells.columns if header.startswith(column))
    return cells[header].iloc[min(rows, key=lambda place: len(cells.index[place]))]


def order(frame: pd.DataFrame, value: str) -> str:
    """Kendall's tau between the models' means of ``value`` and what is ``published``, with its p value, in words."""
    means = frame.groupby("model").agg({value: "mean", "published": "first"})
    if len(means) < 3:
        return "fewer than three models have no order"
    tau = kendalltau(means[value], means.published.astype(float))
    return f"Kendall's tau with the published order: {tau.statistic:.2f}, p = {tau.pvalue:.3f}"
