"""Table 6 of the Flowformer paper (Wu et al., ICML 2022): accuracy on the test series in per cent.

The number of a model is the best of all its evaluations on the test series, of one run.
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
#: Data set -> the accuracy of each of ``MODELS``, which are the columns of the table in their order.
TABLE = {
    name: tuple(float(cell) for cell in row.cells[1:])
    for row in read_paper("flowformer").tables["6"].rows
    for name in ARCHIVES
    if name.upper() == row.name
}
#: Ours -> theirs, by the name in front of ``_time_series``.
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
    """The accuracy in the paper of what is called ``name`` here; None if it has none."""
    if dataset not in TABLE or name not in NAMES:
        return None
    return TABLE[dataset][MODELS.index(NAMES[name])]
