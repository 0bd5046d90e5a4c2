"""Draw what Flow-Attention weighs in a ListOps expression, by layer and head (*Flowformer*, Figures 4, 5 and 7 to 9).

``python -m recipes.lra.pictures --checkpoint FILE --data work/lra/listops --expression '[MAX 2 9 [MIN 4 7 ] 0 ]'``
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from matplotlib import pyplot as plt

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import record_attention

from ..runs import new_file
from .data import FIRST_TOKEN, SYMBOLS, encode


def main(arguments: list[str] | None = None) -> None:
    """Run the model on the expression, and draw competition (1 is an even share) beside allocation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="of a flowformer_lra_listops")
    parser.add_argument("--data", type=Path, required=True, help="what recipes.lra.data wrote")
    parser.add_argument("--expression", default="[MAX 2 9 [MIN 4 7 ] 0 ]")
    parser.add_argument("--output", type=new_file, default="weights.png")
    options = parser.parse_args(arguments)
    if unknown := [symbol for symbol in options.expression.split() if symbol not in SYMBOLS]:
        parser.error(f"--expression has {unknown[0]}; allowed: {' '.join(SYMBOLS)}")
    load = ARCH_MODEL_REGISTRY["flowformer_classifier"].from_pretrained
    folder = str((options.data / "data-bin").absolute())
    hub = load(str(options.checkpoint.parent.absolute()), options.checkpoint.name, folder).eval()
    symbols = ["CLS", *options.expression.split()]
    tokens = torch.from_numpy(np.append(0, encode(options.expression) + FIRST_TOKEN))
    with torch.no_grad(), record_attention(hub.model) as records:
        scores, _ = hub.model(tokens[None], classification_head_name="sentence_classification_head")
    maps = {
        "competition": [record.competition[0] / record.competition[0].mean(1, keepdim=True) for record in records],
        "allocation": [record.allocation[0] for record in records],
    }
    heads = [(layer, head) for layer, found in enumerate(maps["allocation"]) for head in range(len(found))]
    size = (3 + 0.44 * len(symbols), 1 + 0.9 * len(heads))
    figure, grid = plt.subplots(len(heads), 2, figsize=size, squeeze=False, layout="constrained")
    for column, (kind, found) in zip(grid.T, maps.items()):
        low, high = min(float(x.min()) for x in found), max(float(x.max()) for x in found)
        for axes, (layer, head) in zip(column, heads):
            weights = found[layer][head].float()
            mappable = axes.imshow(weights[None], vmin=low, vmax=high, aspect="auto")
            for place, symbol in enumerate(symbols):
                light = weights[place] > low + 0.6 * (high - low)
                axes.text(place, 0, symbol, ha="center", va="center", size=6.5, color="black" if light else "white")
            axes.set_title(f"{kind}, layer {layer + 1}, head {head + 1}")
            axes.set_axis_off()
        figure.colorbar(mappable, ax=list(column), aspect=40)
    figure.suptitle(f"predicted {int(scores.argmax())}; competition: 1 is an even share")
    figure.savefig(options.output, dpi=110)


if __name__ == "__main__":
    main()
