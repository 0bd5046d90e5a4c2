"""Table 6 of the Flowformer paper (Wu et al., ICML 2022): accuracy on the test series in per cent.

The paper does not say how a number was selected; the authors' code reports the best of all evaluations on these series.
"""

from ..papers.tables import read_paper
from .archives import ARCHIVES

MODELS = (
    "DTW",
    "XGBoost",
    "Rocket",
    "LSTM",
    "Unsup.",
    "Transformer",
    "Linear Transformer",
    "Reformer",
    "Longformer",
    "Performer",
    "YOSO-E",
    "SOFT",
    "cosFormer",
    "Flowformer",
)
#: Data set -> accuracy of each of ``MODELS``, the table's columns in order.
TABLE = {
    name: tuple(float(cell) for cell in row.cells[1:])
    for row in read_paper("flowformer").tables["6"].rows
    for name in ARCHIVES
    if name.upper() == row.name
}
#: Our name, without ``_time_series`` -> the paper's name.
NAMES = {
    "flow": "Flowformer",
    "flowformer": "Flowformer",
    "softmax": "Transformer",
    "linear": "Linear Transformer",
    "favor": "Performer",
    "cosformer": "cosFormer",
    "longformer": "Longformer",
    "reformer": "Reformer",
    "yoso": "YOSO-E",
}


def published(dataset: str, name: str) -> float | None:
    """The paper's accuracy of the model that is called ``name`` here; None if the paper has none."""
    if dataset not in TABLE or name not in NAMES:
        return None
    return TABLE[dataset][MODELS.index(NAMES[name])]
