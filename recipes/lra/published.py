"""Accuracies in per cent of the Flowformer paper (ICML 2022), Tables 2 and 10: ListOps, Text, Retrieval, Image,
Pathfinder, as printed. The paper copied the rows above cosFormer from the Arena. Table 11 only has averages."""

from ..papers.tables import read_paper, short

ORDER = ("listops", "text", "retrieval", "image", "pathfinder")
_TABLES = read_paper("flowformer").tables
#: The paper's name -> accuracy on each task of ``ORDER``.
ACCURACIES = {
    short(row.name): tuple(float(cell) for cell in row.cells[1 : 1 + len(ORDER)])
    for row in (*_TABLES["2"].rows, *_TABLES["10"].rows[:2])
}


#: Our name -> the paper's name. The Arena's Performer has relu features except on ListOps. In its Local Attention the
#: tokens of a block are far from each other, because of the array layout of its code.
NAMES = {
    "softmax": "TRANSFORMER",
    "flow": "FLOWFORMER",
    "flow+no_competition": "FLOWFORMER W/O COMPETITION",
    "flow+no_allocation": "FLOWFORMER W/O ALLOCATION",
    "flow+elu": "ELU(·) + 1.0",
    "flow+relu": "RELU(·)",
    "linear": "LINEAR TRANS",
    "cosformer": "COSFORMER",
    "favor": "PERFORMER",
    "reformer": "REFORMER",
    "linformer": "LINFORMER",
    "longformer": "LONGFORMER",
    "bigbird": "BIGBIRD",
    "local": "LOCAL ATTENTION",
    "sparse": "SPARSE TRANS",
    "sinkhorn": "SINKHORN TRANS",
    "synthesizer": "SYNTHESIZER",
}


def accuracy(name: str, task: str) -> float | None:
    """The paper's accuracy on ``task`` of the model that is called ``name`` here; None if the paper has none."""
    return ACCURACIES[NAMES[name]][ORDER.index(task)] if name in NAMES else None
