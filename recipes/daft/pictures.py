"""Draw the position biases and keys of a DAFT model: ``python -m recipes.daft.pictures --checkpoint FILE``.

As in *A Dot Product Attention Free Transformer*: exp(w) - 1 of every layer and, given an image, the weights of its
tokens by their keys.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from common.attention import DaftConvAttention, DaftFullAttention, record_keys
from timm_plugin.named_values import NamedValues

from ..trained import Loaded, load

#: A caption, and an image (H, W, 3) or logarithms (Y, X), NaN where there is no token; None is an empty place.
Panel = tuple[str, np.ndarray | None]
#: White: no bias or an even share; blue: less; red: more; grey: no value.
COLOURS = plt.get_cmap("RdBu_r").with_extremes(bad="#BBBBBB")


def biases(model: nn.Module, heads: int) -> tuple[list[list[Panel]], dict[str, Any]]:
    """Panels of w in every layer: a matrix, a line for each head, or filters; and the arguments of imshow."""
    modules = [x for x in model.modules() if isinstance(x, DaftConvAttention | DaftFullAttention)]
    if not modules:
        raise SystemExit(f"--checkpoint is of a {type(model).__name__} without DAFT; allowed: a model that holds it")
    layers = [module.position_bias().detach().float() for module in modules]
    if isinstance(modules[0], DaftFullAttention):
        if modules[0].causal:
            future = torch.ones_like(layers[0], dtype=torch.bool).triu(1)
            layers = [w.masked_fill(future, torch.nan) for w in layers]
        return in_rows(layers), {}
    layers = [w[:heads] for w in layers]
    if layers[0].ndim == 3:
        return [in_row(f"layer {i}, head", layer) for i, layer in enumerate(layers, 1)], {}
    shown, window = layers[0].shape
    first = 1 - window if modules[0].causal else -(window // 2)  # the distance of the first token in the window
    return in_rows(layers), {"aspect": "auto", "extent": (first - 0.5, first + window - 0.5, shown + 0.5, 0.5)}


def in_row(name: str, maps: Iterable[Tensor]) -> list[Panel]:
    """A panel for each map, with its number in the caption."""
    return [(f"{name} {i}", x.numpy()) for i, x in enumerate(maps, 1)]


def in_rows(layers: Sequence[Tensor]) -> list[list[Panel]]:
    """A panel for each layer, four in a row."""
    panels = in_row("layer", layers)
    return [panels[i : i + 4] for i in range(0, len(panels), 4)]


@torch.no_grad()
def keys(loaded: Loaded, path: Path, heads: int) -> list[list[Panel]]:
    """Panels of an image as the model reads it, and of log(exp(K) / its mean) in every layer, for each head."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    shown, layers = {"images": keys_of_images, "pixels": keys_of_pixels}[loaded.reads](loaded, image)
    full = any(isinstance(module, DaftFullAttention) for module in loaded.model.modules())
    kind = "channel" if full else "head"  # DAFT-full has a key for each channel
    rows = [in_row(f"layer {i}, {kind}", maps[:heads]) for i, maps in enumerate(layers, 1)]
    return [[("", None) if i else ("image", shown), *row] for i, row in enumerate(rows)]


def keys_of_images(loaded: Loaded, image: Image.Image) -> tuple[np.ndarray, list[Tensor]]:
    """The image after timm's preprocessing of evaluation, and its log shares (heads, Y, X) in every layer."""
    model, data = loaded.model, loaded.data
    if model.in_chans == 1:  # timm's defaults have three numbers for any number of channels
        data = {**data, **{name: (sum(data[name]) / len(data[name]),) for name in ("mean", "std")}}
    pixels = create_transform(**data, is_training=False)(image.convert("L") if model.in_chans == 1 else image)
    with record_keys(model) as records:
        model(pixels[None])
    grid, prefix = model.patch_embed.dynamic_feat_size(pixels.shape[1:]), model.num_prefix_tokens
    layers = [log_shares(record.keys[0, :, prefix:]).unflatten(1, grid) for record in records]
    mean, std = (torch.tensor(data[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return (pixels * std + mean).clamp(0, 1).permute(1, 2, 0).expand(-1, -1, 3).numpy(), layers


def keys_of_pixels(loaded: Loaded, image: Image.Image) -> tuple[np.ndarray, list[Tensor]]:
    """The image as pixel_modeling reads it; a pixel has the mean share of its subpixels."""
    from fairseq_plugin.data.pixels import ImageShape, to_tokens

    length = loaded.model.max_positions()
    sides = {channels: math.isqrt(length // channels) for channels in (1, 3)}
    shapes = [ImageShape(side, side, channels) for channels, side in sides.items()]
    shape = next((shape for shape in shapes if shape.length == length), None)
    if shape is None:
        raise SystemExit(f"the model reads images of {length} subpixels; allowed with --image: square ones")
    resized = image.convert("L" if shape.channels == 1 else "RGB").resize((shape.width, shape.height))
    values = torch.from_numpy(np.array(resized)).view(1, *shape)  # (1, H, W, C)
    tokens = to_tokens(values)  # (1, T)
    start = torch.full_like(tokens[:, :1], 2)  # every image starts with fairseq's </s>
    with record_keys(loaded.model) as records:
        loaded.model(torch.cat([start, tokens[:, :-1]], dim=1))
    # The model reads </s> and all subpixels except the last, which therefore has no key.
    shares = [log_shares(record.keys[0, :, 1:]).exp() for record in records]
    shares = [nn.functional.pad(share, (0, 1), value=torch.nan).unflatten(1, shape).nanmean(-1) for share in shares]
    return (values[0] / 255).expand(-1, -1, 3).numpy(), [share.log() for share in shares]


def log_shares(keys: Tensor) -> Tensor:
    """Keys (H, n, c) of one image -> log(exp(keys) / their mean over tokens), (H c, n)."""
    keys = keys.float().transpose(1, 2).flatten(0, 1)
    return keys.log_softmax(1) + math.log(keys.shape[1])


def draw(
    rows: list[list[Panel]], value: Callable[[float], float], label: str, title: str, path: Path, **shown: Any
) -> None:
    """Write panels with one scale of colours, linear in the logarithms; its ticks say the ``value`` of each."""
    sizes = [np.abs(x[np.isfinite(x)]) for row in rows for _, x in row if x is not None and x.ndim == 2]
    limit = float(np.quantile(np.concatenate(sizes), 0.995))  # an outlier must not make all others pale
    limit = limit if limit > 1e-6 else 1.0  # all biases of a new model are 0
    columns, small = max(map(len, rows)), rows[0][0][0] != "layer 1"
    side = 1.1 if small else 2.9
    figure, grid = plt.subplots(
        len(rows), columns, figsize=(side * columns + 2, side * len(rows) + 0.8), squeeze=False, layout="compressed"
    )
    for axes in grid.flat:
        axes.set_axis_off()
    for axes_row, row in zip(grid, rows):
        for axes, (caption, panel) in zip(axes_row, row):
            axes.set_title(caption, fontsize=6 if small else 9)
            if panel is None:
                continue
            if panel.ndim == 3:
                axes.imshow(panel)
                continue
            axes.set_axis_on()
            axes.grid(visible=False)
            colours = axes.imshow(panel, cmap=COLOURS, vmin=-limit, vmax=limit, interpolation="nearest", **shown)
            if small:
                axes.set(xticks=[], yticks=[])
            elif "extent" in shown:
                axes.set(xlabel="distance of the token seen", ylabel="head")
                axes.yaxis.get_major_locator().set_params(integer=True)
            else:
                axes.set(xlabel="token seen", ylabel="token")
    bar = figure.colorbar(colours, ax=figure.axes, extend="both", shrink=min(1.0, 4 / figure.get_figheight()))
    bar.ax.yaxis.set_major_formatter(lambda log, _: f"{value(log):.3g}")
    bar.set_label(label)
    figure.suptitle(title)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="of either host, or a folder of timm's hub")
    parser.add_argument("--image", type=Path, help="draw its keys, too; for models of images and of pixels")
    parser.add_argument("--output", type=Path, default=Path("pictures"), help="a new folder; default: %(default)s")
    parser.add_argument("--heads", type=int, default=8, help="most heads shown of a layer (%(default)s)")
    parser.add_argument("--model", help="timm's name of the model, where the file does not say it")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=NamedValues, metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if options.output.exists():
        parser.error(f"--output is {options.output}, which exists; allowed: a new folder")
    loaded = load(options.checkpoint, options.model, options.model_kwargs)
    if options.image and loaded.reads == "text":
        parser.error(f"--image is {options.image}; allowed with a language model of text: none")
    title, (rows, shown) = type(loaded.model).__name__, biases(loaded.model, options.heads)
    maps = keys(loaded, options.image, options.heads) if options.image else None
    options.output.mkdir(parents=True)
    draw(rows, math.expm1, "exp(w) - 1", f"{title}: position biases", options.output / "position_biases.png", **shown)
    if maps:
        draw(maps, math.exp, "exp(K) / its mean", f"{title}: weights by keys", options.output / "key_maps.png")
    print(f"Ready: {options.output}")


if __name__ == "__main__":
    main()
