"""Accuracies in per cent of the Flowformer paper (ICML 2022), Tables 2, 10 and 11: ListOps, Text, Retrieval, Image,
Pathfinder, as printed. The rows above cosFormer are the Arena's own."""

ORDER = ("listops", "text", "retrieval", "image", "pathfinder")
#: Table 2.
ACCURACIES = {
    "Local Attention": (15.82, 52.98, 53.39, 41.46, 66.63),
    "Linear Transformer": (16.13, 65.90, 53.09, 42.34, 75.30),
    "Reformer": (37.27, 56.10, 53.40, 38.07, 68.50),
    "Sparse Transformer": (17.07, 63.58, 59.59, 44.24, 71.71),
    "Sinkhorn": (33.67, 61.20, 53.83, 41.23, 67.45),
    "Linformer": (35.70, 53.94, 52.27, 38.56, 76.34),
    "Performer": (18.01, 65.40, 53.82, 42.77, 77.05),
    "Synthesizer": (36.99, 61.68, 54.67, 41.61, 69.45),
    "Longformer": (35.63, 62.85, 56.89, 42.22, 69.71),
    "Transformer": (36.37, 64.27, 57.46, 42.44, 71.40),
    "BigBird": (36.05, 64.02, 59.29, 40.83, 74.87),
    "cosFormer": (37.90, 63.41, 61.36, 43.17, 70.33),
    "Flowformer": (38.70, 64.29, 62.24, 43.20, 73.95),
}


#: Ours -> theirs. The Arena's Performer has relu features but on ListOps, and its Local Attention, by the layout of its
#: code, tokens far from each other.
NAMES = {
    "softmax": "Transformer",
    "flow": "Flowformer",
    "linear": "Linear Transformer",
    "cosformer": "cosFormer",
    "favor": "Performer",
    "reformer": "Reformer",
    "linformer": "Linformer",
    "longformer": "Longformer",
    "bigbird": "BigBird",
    "local": "Local Attention",
    "sparse": "Sparse Transformer",
    "sinkhorn": "Sinkhorn",
    "synthesizer": "Synthesizer",
}


def accuracy(name: str, task: str) -> float | None:
    """The accuracy on ``task`` of what is called ``name`` here; None where the paper has none."""
    return ACCURACIES[NAMES[name]][ORDER.index(task)] if name in NAMES else None
