"""Draw image models' weights of patches: ``python -m recipes.imagenet.pictures --checkpoint FILE --image FILE``.

Several models side by side, as Figures 4 and 9 of *Flowformer*: for each patch the sum of the attention weights that
all patches give it in one layer, or its competition in Flow-Attention. Also Flow-Attention's allocation (Figures 5, 7).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from common.attention import InnerAttention, record_attention
from common.modules import GatedAttentionUnit
from timm_plugin import replace_attention

from ..trained import Loaded, load


class Seen(NamedTuple):
    """The patches of one image in one layer of a model."""

    image: np.ndarray  # (H, W, 3), 0..1, as the model reads it
    predicted: int
    weights: np.ndarray  # (Y, X), mean over heads, divided by the mean of all patches: 1 is an even share
    allocation: np.ndarray | None  # (Y, X); None unless Flow-Attention


def attentions(model: nn.Module) -> list[nn.Module]:
    """The mechanisms of a model, in order; timm's own softmax attention is replaced by ours, with the same outputs."""
    kinds = (InnerAttention, GatedAttentionUnit)
    if not any(isinstance(module, kinds) for module in model.modules()):
        replace_attention(model, "softmax")
    found = (module for module in model.modules() if isinstance(module, kinds))
    return [module for module in found if not any(isinstance(part, InnerAttention) for part in module.children())]


@torch.no_grad()
def look(loaded: Loaded, attention: nn.Module, path: Path) -> Seen:
    """Run the model on an image file."""
    with Image.open(path) as file:
        pixels = create_transform(**loaded.data, is_training=False)(file.convert("RGB"))  # (C, H, W)
    flow = hasattr(attention, "recorded_weights")  # Flow-Attention is recorded without the (n, n) attention matrix
    with record_attention(attention, maps=not flow) as records:
        scores = loaded.model(pixels[None])

    def patches(weights: Tensor) -> np.ndarray:
        """Token weights (1, H, n) -> mean over heads (Y, X) of the patches, without class tokens."""
        of_patches = weights[0].float().mean(0)[getattr(loaded.model, "num_prefix_tokens", 0) :]
        rows = round((len(of_patches) * pixels.shape[1] / pixels.shape[2]) ** 0.5)
        return of_patches.view(rows, -1).numpy()

    record = records[-1]
    weights = patches(record.competition if flow else record.summed)
    mean, std = (torch.tensor(loaded.data[name]).view(-1, 1, 1) for name in ("mean", "std"))
    image = (pixels * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
    allocation = patches(record.allocation) if flow else None
    return Seen(image, int(scores.argmax()), weights / weights.mean(), allocation)


def draw(rows: list[list[Seen]], field: str, names: Sequence[str], label: str, path: Path, **shown: Any) -> None:
    """Write a picture with a row for each image: the image, and a map for each model that has the ``field``."""
    columns = [i for i, seen in enumerate(rows[0]) if getattr(seen, field) is not None]
    size = (1.9 * (1 + len(columns)) + 1.4, 1.9 * len(rows) + 0.8)
    figure, grid = plt.subplots(len(rows), 1 + len(columns), figsize=size, squeeze=False, layout="constrained")
    for axes_row, row in zip(grid, rows):
        axes_row[0].imshow(row[0].image)
        for axes, i in zip(axes_row[1:], columns):
            colours = axes.imshow(getattr(row[i], field), **shown)
            axes.set_xlabel(f"predicted {row[i].predicted}", fontsize=9)
        for axes in axes_row:
            axes.set(xticks=[], yticks=[])
    for axes, name in zip(grid[0], ["image", *(names[i] for i in columns)]):
        axes.set_title(name, fontsize=9)
    figure.colorbar(colours, ax=figure.axes, shrink=0.8, label=label)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, nargs="+", required=True, help="one or more of timm's train.py")
    parser.add_argument("--image", type=Path, nargs="+", required=True, help="one or more image files")
    parser.add_argument("--names", nargs="+", help="of the checkpoints; by default model and attention")
    parser.add_argument("--layer", type=int, default=-1, help="from 1; -1, the default, is the last, -2 the one before")
    parser.add_argument("--output", type=Path, default=Path("pictures"), help="a new folder; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.names and len(options.names) != len(options.checkpoint):
        parser.error(f"--names has {len(options.names)} names; allowed: {len(options.checkpoint)}, one for each")
    if options.output.exists():
        parser.error(f"--output is {options.output}, which exists; allowed: a new folder")
    columns, names = [], []
    for checkpoint in options.checkpoint:
        loaded = load(checkpoint)
        if loaded.reads != "images":
            parser.error(f"--checkpoint is {checkpoint}, of fairseq-train; allowed: image models of timm's train.py")
        modules = attentions(loaded.model)
        if options.layer == 0 or not -len(modules) <= options.layer <= len(modules):
            parser.error(f"--layer is {options.layer}; allowed for {checkpoint}: 1 to {len(modules)}, or negative")
        attention = modules[options.layer - (options.layer > 0)]
        columns.append([look(loaded, attention, image) for image in options.image])
        kind = "competition" if columns[-1][0].allocation is not None else "summed weights"
        names.append(f"{type(loaded.model).__name__}, {attention.name if hasattr(attention, 'name') else ''}\n{kind}")
    rows = [list(row) for row in zip(*columns)]
    weights = np.concatenate([seen.weights.ravel() for row in rows for seen in row])
    norm = TwoSlopeNorm(1.0, min(0.0, weights.min()), max(1.01, np.quantile(weights, 0.995)))  # not up to an outlier
    names, label = options.names or names, "weight of a patch over the mean; 1 is an even share"
    options.output.mkdir(parents=True)
    draw(rows, "weights", names, label, options.output / "attention.png", cmap="RdBu_r", norm=norm)
    gates = [seen.allocation for row in rows for seen in row if seen.allocation is not None]
    if gates:
        limits = {"vmin": min(map(np.min, gates)), "vmax": max(map(np.max, gates))}
        label = "allocation of a patch, from 0 to 1"
        draw(rows, "allocation", names, label, options.output / "allocation.png", **limits)
    print(f"Ready: {options.output}")


if __name__ == "__main__":
    main()
