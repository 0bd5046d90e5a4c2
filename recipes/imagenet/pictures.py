"""Draw image models' weights of patches: ``python -m recipes.imagenet.pictures --checkpoint FILE --image FILE``.

Draws several models side by side, as Figures 4 and 9 of *Flowformer*: for each patch the sum of the attention weights
that all patches give it in the last layer, or its competition in Flow-Attention. Also draws Flow-Attention's allocation
(Figures 5 and 7).
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from common.attention import InnerAttention, record_attention
from common.command_parser import CommandParser
from common.modules import GatedAttentionUnit

from ..shared.commands import shown_path
from ..shared.image_folder import UNREADABLE
from ..shared.plots import STYLE, save
from ..shared.scripts import script
from ..shared.trained_models import Loaded, load_image_model
from ..shared.working_folder import working_folder

COMMAND = "recipes.imagenet.pictures"
#: Fraction of the values inside the colour scale, so that an outlier does not make all others pale.
_INSIDE = 0.995


class Seen(NamedTuple):
    """Weights of the patches of one image in one layer of a model, averaged over heads."""

    predicted: int  # class index
    weights: np.ndarray  # (Y, X), divided by the mean of all patches: 1 is an even share
    competition: bool  # True: Flow-Attention's competition; False: column sums of the attention matrix
    allocation: np.ndarray | None  # (Y, X); None unless Flow-Attention


def attentions(loaded: Loaded) -> list[nn.Module]:
    """The attention modules of a model, in order; timm's own softmax attention is replaced by ours, in place.

    Raises:
        ValueError: the model has no attention that can be replaced.
    """
    from timm_plugin import replace_attention

    def find_mechanisms() -> list[nn.Module]:
        kinds = (InnerAttention, GatedAttentionUnit)
        return [module for module in loaded.model.modules() if isinstance(module, kinds) and _has_map(module)]

    if not find_mechanisms():
        replace_attention(loaded.model, "softmax")  # same weights, same outputs
    return find_mechanisms()


def _has_map(module: nn.Module) -> bool:
    """Whether ``module`` is a mechanism itself, not a wrapper around one."""
    return not any(isinstance(part, InnerAttention) for part in module.children())


def read_image(path: Path) -> Image.Image:
    """Read an image file as RGB.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except UNREADABLE as error:
        raise ValueError(f"--image is {path}, which cannot be read ({error}); allowed: an image file") from error


@torch.no_grad()
def weights_seen(loaded: Loaded, attention: nn.Module, image: Image.Image) -> tuple[np.ndarray, Seen]:
    """Run the model on an image; returns the image as the model reads it, (H, W, 3) in 0..1, and the weights.

    Raises:
        ValueError: the model does not read colour images, or the tokens of ``attention`` do not form a grid.
    """
    from timm.data import create_transform

    if loaded.data["input_size"][0] != 3:
        raise ValueError(f"the model reads {loaded.data['input_size'][0]} channels; allowed: 3")
    pixels = create_transform(**loaded.data, is_training=False)(image)  # (C, H, W)
    flow = hasattr(attention, "recorded_weights")  # Flow-Attention is recorded without the (n, n) attention matrix
    with record_attention(attention, maps=not flow) as records:
        scores = loaded.model(pixels[None])
    record, prefix = records[-1], getattr(loaded.model, "num_prefix_tokens", 0)
    weights = record.competition if flow else record.summed
    weights = _as_grid(weights, prefix, pixels)
    seen = Seen(
        int(scores.argmax()),
        weights / weights.mean(),
        flow,
        _as_grid(record.allocation, prefix, pixels) if flow else None,
    )
    mean, std = (torch.tensor(loaded.data[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return (pixels * std + mean).clamp(0, 1).permute(1, 2, 0).numpy(), seen


def _as_grid(weights: Tensor, prefix: int, pixels: Tensor) -> np.ndarray:
    """Token weights (1, H, n) -> mean over heads (Y, X) of the patches, without the first ``prefix`` tokens."""
    patches = weights[0].float().mean(0)[prefix:]
    height, width = pixels.shape[1:]
    rows = max(1, round((len(patches) * height / width) ** 0.5))
    if len(patches) % rows:
        raise ValueError(f"the layer has {len(patches)} tokens; allowed: those of a grid in the shape of the image")
    return patches.view(rows, -1).numpy()


def draw_weights(
    images: Sequence[np.ndarray], seen: Sequence[Sequence[Seen]], names: Sequence[str], path: Path
) -> None:
    """Write the picture of weights: one row per image, one column per model; ``names`` are the models' names."""
    all_weights = np.concatenate([seen_image.weights.ravel() for row in seen for seen_image in row])
    low, high = min(0.0, float(all_weights.min())), max(1.01, float(np.quantile(all_weights, _INSIDE)))
    norm = TwoSlopeNorm(1.0, low, high)
    kinds = ["competition" if seen_image.competition else "summed weights" for seen_image in seen[0]]
    with plt.rc_context(STYLE):
        figure, mappable = _rows(
            images,
            [[(seen_image.weights, f"predicted {seen_image.predicted}") for seen_image in row] for row in seen],
            [f"{name}\n{kind}" for name, kind in zip(names, kinds)],
            {"cmap": "RdBu_r", "norm": norm},
        )
        bar = figure.colorbar(
            mappable, ax=figure.axes, shrink=0.8, extend="max" if all_weights.max() > high else "neither"
        )
        bar.set_label("weight of a patch over the mean; 1 is an even share")
        # A tick outside the scale would stretch it.
        bar.set_ticks([math.ceil(100 * low) / 100, 0.5 + low / 2, 1, 0.5 + high / 2, math.floor(100 * high) / 100])
        bar.ax.yaxis.set_major_formatter("{x:.2f}")
        save(figure, path, dpi=100)


def draw_allocation(
    images: Sequence[np.ndarray], seen: Sequence[Sequence[Seen]], names: Sequence[str], path: Path
) -> None:
    """Write the picture of allocation, for the models that have it."""
    columns = [i for i, seen_image in enumerate(seen[0]) if seen_image.allocation is not None]
    rows = [[(row[i].allocation, f"predicted {row[i].predicted}") for i in columns] for row in seen]
    with plt.rc_context(STYLE):
        titles = [f"{names[i]}\nallocation" for i in columns]
        figure, mappable = _rows(images, rows, titles, {"cmap": "viridis", **_limits(rows)})
        bar = figure.colorbar(mappable, ax=figure.axes, shrink=0.8)
        bar.set_label("allocation of a patch, from 0 to 1")
        save(figure, path, dpi=100)


def _limits(rows: Sequence[Sequence[tuple[np.ndarray, str]]]) -> dict[str, float]:
    """The smallest and largest value, as limits of the colour scale."""
    return {
        "vmin": min(float(values.min()) for row in rows for values, _ in row),
        "vmax": max(float(values.max()) for row in rows for values, _ in row),
    }


def _rows(
    images: Sequence[np.ndarray],
    rows: Sequence[Sequence[tuple[np.ndarray, str]]],
    titles: Sequence[str],
    options: dict,
) -> tuple[Figure, plt.cm.ScalarMappable]:
    """Draw one row per image: the image, then (map, caption) for each of ``titles``, the column titles of the maps."""
    size = (1.9 * (1 + len(titles)) + 1.4, 1.9 * len(images) + 0.8)
    figure, grid = plt.subplots(len(images), 1 + len(titles), figsize=size, squeeze=False, layout="constrained")
    for row, (axes_of_row, image, maps) in enumerate(zip(grid, images, rows)):
        axes_of_row[0].imshow(image)
        for axes, title, (values, caption) in zip(axes_of_row[1:], titles, maps):
            mappable = axes.imshow(values, **options)
            axes.set_xlabel(caption, fontsize=9)
            if row == 0:
                axes.set_title(title, fontsize=9)
        for axes in axes_of_row:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    grid[0, 0].set_title("image", fontsize=9)
    return figure, mappable


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", type=Path, nargs="+", required=True, metavar="FILE", help="one or more of timm's train.py"
    )
    parser.add_argument("--image", type=Path, nargs="+", required=True, metavar="FILE", help="one or more images")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="of the checkpoints; by default model and attention")
    parser.add_argument(
        "--layer",
        type=int,
        default=-1,
        metavar="N",
        help="from 1; -1, the default, is the last layer, -2 the one before",
    )
    parser.add_argument("--output", type=Path, default=Path("pictures"), metavar="FOLDER", help="default: %(default)s")
    return parser


@script("pictures")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.names and len(options.names) != len(options.checkpoint):
        raise ValueError(f"--names has {len(options.names)} names; allowed: {len(options.checkpoint)}, a name for each")
    with working_folder(options.output, COMMAND, "--output"):
        written = _draw(options)
    print("Ready: " + ", ".join(shown_path(path) for path in written))
    return 0


def _draw(options: argparse.Namespace) -> list[Path]:
    """Write the pictures; returns their paths."""
    files = [read_image(path) for path in options.image]
    images, columns, names = [], [], []
    for checkpoint in options.checkpoint:
        loaded = load_image_model(checkpoint)
        attention = _layer(attentions(loaded), options.layer, checkpoint)
        results = [weights_seen(loaded, attention, image) for image in files]
        images = images or [image for image, _ in results]
        columns.append([seen for _, seen in results])
        kind = getattr(attention, "name", None) or type(attention).__name__
        names.append(f"{type(loaded.model).__name__}, {kind}")
    rows = list(zip(*columns))
    written = [options.output / "attention.png"]
    draw_weights(images, rows, options.names or names, written[0])
    if any(seen.allocation is not None for seen in rows[0]):
        written.append(options.output / "allocation.png")
        draw_allocation(images, rows, options.names or names, written[1])
    return written


def _layer(modules: list[nn.Module], number: int, checkpoint: Path) -> nn.Module:
    """The attention of layer ``number``, counted from 1, or from the end if negative."""
    if number == 0 or not -len(modules) <= number <= len(modules):
        raise ValueError(
            f"--layer is {number}; allowed for {checkpoint}: 1 to {len(modules)}, or -1 to -{len(modules)}"
        )
    return modules[number - 1 if number > 0 else number]


if __name__ == "__main__":
    sys.exit(main())
