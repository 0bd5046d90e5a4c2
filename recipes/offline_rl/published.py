"""Table 7 of the Flowformer paper (Wu et al., ICML 2022): normalised scores on D4RL, mean and deviation over 3 seeds.

The paper does not state which of the two targets was used, nor whether the last or the best iteration is reported.
"""

from ..papers.tables import read_paper
from ..shared.sources import D4RL

MODELS = ("DT", "Linear", "Reformer", "Performer", "cosFormer", "Flowformer")
_TABLE_7 = read_paper("flowformer").tables["7"]
#: Data set -> mean and deviation of each of ``MODELS``, which are the columns after BC and AWAC.
TABLE = {
    name: tuple(tuple(float(number) for number in cell.split("±")) for cell in row.cells[-len(MODELS) :])
    for name, row in zip(D4RL, (row for row in _TABLE_7.rows if row.cells[1] and row.name != "AVG REWARD"))
}


def published(dataset: str) -> str | None:
    """The row of a data set as text; None if the paper does not have the data set."""
    if dataset not in TABLE:
        return None
    return ", ".join(f"{model} {mean} ± {deviation}" for model, (mean, deviation) in zip(MODELS, TABLE[dataset]))
