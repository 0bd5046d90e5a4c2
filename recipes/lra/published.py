"""Accuracies in per cent of the Flowformer paper (ICML 2022), Tables 2 and 10: ListOps, Text, Retrieval, Image,
Pathfinder, as printed. The rows above cosFormer are the Arena's own. Table 11 has averages alone."""

from ..papers.tables import read_paper, short

ORDER = ("listops", "text", "retrieval", "image", "pathfinder")
_TABLES = read_paper("flowformer").tables
#: Theirs -> the accuracy on each task of ``ORDER``.
ACCURACIES = {
    short(row.name): tuple(float(cell) for cell in row.cells[1 : 1 + len(ORDER)])
    for row in (*_TABLES["2"].rows, *_TABLES["10"].rows[:2])
}


#: Ours -> theirs. The Arena's Performer has relu features but on ListOps, and its Local Attention, by the layout of its
#: code, tokens far from each other.
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
    """The accuracy on ``task`` of what is called ``name`` here; None where the paper has none."""
    return ACCURACIES[NAMES[name]][ORDER.index(task)] if name in NAMES else None
