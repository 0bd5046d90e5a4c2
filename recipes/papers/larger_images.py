"""Train DAFT-conv on small images and evaluate it on larger ones; fine-tune it from a softmax model's weights.

``python -m recipes.papers.larger_images`` from the checkout's root: Table 3, Figure 2 and Equations 10 and 11 of the
DAFT paper in small, on 5,000 of MNIST's digits or on ``--data-dir``. Run again, it goes on with the next model.
"""

import argparse
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
from timm.utils import random_seed
from torch import nn
from torch.nn import functional as F

from common.checkpoints import read_checkpoint
from common.files import tensor_files
from timm_plugin.convert import convert

from ..images import Images, fit
from ..runs import plt, report, spread, table
from . import speed
from .images import begun, build, recorded, scaled_window, size_parser, small_model, top1

#: The softmax model, and what is made of it for larger images.
DEIT, DEIT_LARGER, FINE_TUNED, RANDOM = "DeiT", "DeiT, larger", "DAFT-conv ft", "DAFT-conv rand"
#: The window of Table 3, on a grid of 24 x 24 patches.
WINDOW, GRID = 25, 24


class Variant(NamedTuple):
    """A model of timm, its arguments beside those of its size, and whether it is trained on larger images."""

    model: str
    kwargs: dict[str, Any] = {}
    larger: bool = False


def variants(options: argparse.Namespace) -> dict[str, Variant]:
    """The models by name, in the order in which they are trained."""
    window = scaled_window(WINDOW, options.larger / options.patch / GRID)
    larger = Variant("daft_conv_s_h16", {"window": window}, larger=True)  # heads of several channels, as in the table
    models = {DEIT: Variant("deit_small_patch16_224"), DEIT_LARGER: Variant("", larger=True)}
    models |= {FINE_TUNED: larger, RANDOM: larger}
    for window in options.windows:
        for alone in (False, True):  # whether nothing outside of the window is seen
            name = f"DAFT-conv, window {window}{' alone' * alone}"
            models[name] = Variant("daft_conv_s", {"window": window, "local_only": alone})
    # The paper's weight of the entropy, and its temperature.
    return models | {
        "DAFT-conv, Equation 10": Variant("daft_conv_s", {"entropy_weight": 0.001}),
        "DAFT-conv, Equation 11": Variant("daft_conv_s", {"gumbel_temperature": 0.5}),
    }


def started(name: str, seed: int, options: argparse.Namespace, images: dict[str, Images], side: int) -> nn.Module:
    """A model before its training, with random weights or those that it starts from."""
    of_deit, of_larger = (options.out / "runs" / f"{x}.{seed}.pth" for x in (DEIT, DEIT_LARGER))
    if name == DEIT_LARGER:
        model = started(DEIT, seed, options, images, options.side)
        model.load_state_dict(read_checkpoint(of_deit))
        model.set_input_size(img_size=(side, side))
        return model
    variant = variants(options)[name]
    architecture, kwargs = small_model(variant.model, options, side)
    kwargs |= variant.kwargs
    if name != FINE_TUNED:
        return build(architecture, kwargs, images, seed)
    random_seed(seed)
    return convert(architecture, of_larger, kwargs)


def top1_at(model: nn.Module, images: dict[str, Images], side: int) -> float:
    """Accuracy on images of another size; the positions of a softmax model are interpolated."""
    if getattr(model, "pos_embed", None) is not None:
        model = copy.deepcopy(model)
        model.set_input_size(img_size=(side, side))
    return top1(model, resized(images, side)["validation"])


def resized(images: dict[str, Images], side: int) -> dict[str, Images]:
    """``images`` in another size."""
    return {
        split: part._replace(pixels=F.interpolate(part.pixels, side, mode="bicubic", antialias=True))
        for split, part in images.items()
    }


def draw(frame: pd.DataFrame, options: argparse.Namespace) -> None:
    """Accuracy by the window, as in Figure 2, and by the size of the images; a dot for each seed."""
    figure, (windows, sizes) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    means = frame.groupby("model", sort=False)[list(map(str, options.sides))].mean()
    for alone, label in (("", "with what is outside"), (" alone", "window alone")):
        names = [f"DAFT-conv, window {window}{alone}" for window in options.windows]
        (line,) = windows.plot(options.windows, means.loc[names, str(options.side)], label=label)
        for window, name in zip(options.windows, names):
            seeds = frame[frame.model == name][str(options.side)]
            windows.plot([window] * len(seeds), seeds, "o", color=line.get_color())
    for name in (DEIT, DEIT_LARGER, f"DAFT-conv, window {max(options.windows)}", FINE_TUNED, RANDOM):
        sizes.plot(options.sides, means.loc[name], "o-", label=name)
    windows.set(xlabel="side of the window, tokens", title=f"DAFT-conv, images of {options.side} x {options.side}")
    sizes.set(xlabel="side of the evaluated images, pixels", title="by the size of the evaluated images")
    for axes in (windows, sizes):
        axes.set_ylabel("accuracy, held-out images, %")
        axes.legend()
    figure.savefig(options.out / "results.png", dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the table, and draw; or time Table 3."""
    parser = size_parser(__doc__.splitlines()[0], "work/papers/larger_images")
    parser.add_argument("--larger", type=int, default=49, help="side of the images of the models for larger ones")
    parser.add_argument("--sides", type=int, nargs="+", default=[28, 35, 49, 56], help="of the evaluated images")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 3, 5], help="of Figure 2, odd")
    options = parser.parse_args(arguments)
    options.sides = sorted({*options.sides, options.side, options.larger})
    if wrong := [side for side in options.sides if side % options.patch]:
        parser.error(f"a side is {wrong[0]}; allowed: whole patches of --patch {options.patch}")
    images, models = begun(options), variants(options)

    size = f"{options.layers} layers of width {options.width} in patches of {options.patch} x {options.patch}"
    if options.speed:
        few = images["validation"]._replace(pixels=images["validation"].pixels[: options.batch])
        pixels = resized({"validation": few}, options.larger)["validation"].pixels
        rows = {"Deit base": DEIT, "DAFT-conv rand": RANDOM}
        built = {row: started(name, 1, options, images, options.larger) for row, name in rows.items()}
        steps = {row: speed.inference(model, pixels) for row, model in built.items()}
        return speed.report(
            options.out,
            "3",
            steps,
            len(pixels),
            [f"{options.batch} images of {options.larger} x {options.larger} pixels", size],
        )

    def train(name: str, seed: int) -> dict[str, Any]:
        side = options.larger if models[name].larger else options.side
        epochs = max(1, options.epochs // 3) if models[name].larger else options.epochs  # 100 of 300 in the paper
        model = started(name, seed, options, images, side)
        fit(model, resized(images, side)["train"], epochs, options.batch, options.lr, f"{name}, seed {seed}")
        if name in (DEIT, DEIT_LARGER):
            tensor_files.save(model.state_dict(), options.out / "runs" / f"{name}.{seed}.pth")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        by_side = {str(other): top1_at(model, images, other) for other in options.sides}
        return {"trained at": side, "parameters": parameters, "top1": by_side}

    frame = recorded(options.out, list(models), range(1, options.seeds + 1), train)
    frame = frame.join(pd.DataFrame(frame.pop("top1").tolist()))
    columns = {"trained at": ("trained at", "first"), "parameters": ("parameters", "first")}
    columns |= {f"top-1 at {side}": (str(side), spread(2)) for side in options.sides} | {"seeds": ("seed", "count")}
    notes = [
        f"{options.data_dir or 'MNIST'}, {len(images['train'].labels):,} images; accuracy on "
        f"{len(images['validation'].labels):,} that are held out, after the last epoch, mean ± deviation over seeds",
        f"{size}, {options.epochs} epochs, a third of them at the larger size",
        f"{DEIT_LARGER}: {DEIT} trained further; {FINE_TUNED} starts from its weights, without its keys, queries, "
        f"positions and class token; alone: a token sees nothing outside of its window",
    ]
    report(options.out, {"DAFT-conv on larger images": table(frame, columns)}, notes, frame)
    draw(frame, options)


if __name__ == "__main__":
    main()
