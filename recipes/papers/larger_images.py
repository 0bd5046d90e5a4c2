"""Train DAFT-conv on small images and evaluate it on larger ones; fine-tune it from a softmax model's weights.

``python -m recipes.papers.larger_images`` from the checkout's root: Table 3, Figure 2 and Equations 10 and 11 of the
DAFT paper in small, on 5,000 of MNIST's digits or on ``--data-dir``. Run again, it goes on with the next model.
"""

import copy
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from timm.utils import random_seed
from torch import nn

from common.checkpoints import read_checkpoint
from common.files import tensor_files
from timm_plugin.convert import convert

from ..shared.comparison import SEEDS, Column, Results, by_model, counted_seeds, make_records
from ..shared.experiment import MINUTES, PARAMETERS, Data, Experiment, Record, option
from ..shared.image_training import Images, read_images, resized
from ..shared.mnist import DIGITS, prepare_images
from ..shared.plots import STYLE, legend_beside, save, style_of
from ..shared.scripts import positive_int
from ..shared.tables import counted, spread
from ..shared.working_folder import atomic_write
from .images import SmallImages, build, check_patches, scaled_window, small_model, top1, train_model
from .small import LARGER as COMMAND
from .small import folder_of

#: The softmax model, and what is made of it for larger images.
DEIT, DEIT_LARGER = "DeiT", "DeiT, larger"
FINE_TUNED, RANDOM = "DAFT-conv ft", "DAFT-conv rand"
ENTROPY, GUMBEL = "DAFT-conv, Equation 10", "DAFT-conv, Equation 11"
#: The paper's weight of the entropy, and its temperature.
_OPTIONS = {ENTROPY: {"entropy_weight": 0.001}, GUMBEL: {"gumbel_temperature": 0.5}}
#: The window of Table 3, on a grid of 24 x 24 patches.
_WINDOW, _PUBLISHED_GRID = 25, 24
#: The paper fine-tunes for 100 epochs what was trained for 300.
_SHARE_OF_EPOCHS = 3
_LIMITS = (
    "Larger images are the same ones with interpolated pixels, so nothing new is to be seen in them; {learned:,} small "
    "images say nothing of photographs, and models that differ by less than a per cent have no order."
)


@dataclass(frozen=True, kw_only=True)
class LargerImages(SmallImages):
    """The options: the sides of the larger images, and of the windows of Figure 2."""

    models: Sequence[str] = ()
    larger: int = option(49, "side of the images of the models for larger ones (%(default)s)")
    sides: Sequence[int] = option(
        (28, 35, 49, 56), "of the images on which all are evaluated (%(default)s)", nargs="+", type=positive_int
    )
    windows: Sequence[int] = option((1, 3, 5), "of Figure 2 (%(default)s)", nargs="+", type=positive_int)

    def completed(self) -> "LargerImages":
        """The options with the names of the models, evaluated also at the sides at which they are trained.

        Raises:
            ValueError: a size with which a model cannot be built, or a window that is not odd.
        """
        self.check_sizes(variant.model for variant in self.variants.values() if variant.model)
        for name, side in (("--larger", self.larger), *(("--sides", side) for side in self.sides)):
            check_patches(name, side, "--patch", self.patch)
        if even := [window for window in self.windows if window % 2 == 0]:
            raise ValueError(f"--windows has {even[0]}; allowed: odd numbers")
        sides = sorted({*self.sides, self.side, self.larger})
        return replace(self, models=list(self.variants), sides=sides, windows=list(self.windows))

    @property
    def variants(self) -> dict[str, "Variant"]:
        """The models by name, in the order in which they are trained."""
        usual, grid = "daft_conv_s", self.larger // self.patch
        like_table_3 = {"window": scaled_window(_WINDOW, grid / _PUBLISHED_GRID)}
        larger = Variant("daft_conv_s_h16", like_table_3, larger=True)  # heads of several channels, as in the table
        variants = {DEIT: Variant("deit_small_patch16_224"), DEIT_LARGER: Variant("", larger=True)}
        variants |= {FINE_TUNED: larger, RANDOM: larger}
        for window in self.windows:
            for alone in (False, True):
                variants[window_name(window, alone)] = Variant(usual, {"window": window, "local_only": alone})
        return variants | {name: Variant(usual, options) for name, options in _OPTIONS.items()}


class Variant(NamedTuple):
    """A model of timm, its arguments beside those of its size, and whether it is trained on larger images."""

    model: str
    options: dict[str, Any] = {}
    larger: bool = False


def window_name(window: int, alone: bool) -> str:
    """The name of a model of Figure 2; ``alone``: nothing outside of the window is seen."""
    return f"DAFT-conv, window {window}{' alone' * alone}"


class Trainings:
    """Trains each model with each seed, and evaluates it on images of all sizes."""

    def __init__(self, options: LargerImages, data: Data) -> None:
        self.options, self.runs = options, options.out / "runs"
        images = read_images(data.folder, options.side)
        self.images = {side: _resized(images, side) for side in options.sides}

    def run(self) -> Results:
        """Train and evaluate what is missing, all models with the first seed before any with the second."""
        seeds = range(1, self.options.seeds + 1)
        return make_records(
            (self.runs / f"{folder_of(name)}.{seed}.json", functools.partial(self._record, name, seed))
            for seed in seeds
            for name in self.options.models
        )

    def _record(self, name: str, seed: int) -> Record:
        options, variant = self.options, self.options.variants[name]
        side = options.larger if variant.larger else options.side
        epochs = _later_epochs(options) if variant.larger else options.epochs
        model = self._started(name, variant, side, seed)
        record = train_model(model, self.images[side], epochs, options, f"{name}, seed {seed}")
        if name in (DEIT, DEIT_LARGER):
            with atomic_write(self._weights(name, seed)) as part:
                tensor_files.save(model.state_dict(), part)
        record["top1"] = {str(other): self._top1(model, other) for other in options.sides}
        return {"model": name, "seed": seed, "trained": side, **record}

    def _started(self, name: str, variant: Variant, side: int, seed: int) -> nn.Module:
        """A model before its training, with random weights or those that it starts from."""
        if name == DEIT_LARGER:
            model = self._started(DEIT, self.options.variants[DEIT], self.options.side, seed)
            model.load_state_dict(read_checkpoint(self._weights(DEIT, seed)))
            model.set_input_size(img_size=(side, side))
            return model
        architecture, arguments = small_model(variant.model, replace(self.options, side=side))
        arguments |= variant.options
        if name != FINE_TUNED:
            return build(architecture, arguments, self.images[side], seed)
        random_seed(seed)
        return convert(architecture, self._weights(DEIT_LARGER, seed), arguments)

    def _top1(self, model: nn.Module, side: int) -> float:
        """Accuracy on images of another size; the positions of a softmax model are interpolated."""
        if getattr(model, "pos_embed", None) is not None:
            model = copy.deepcopy(model)
            model.set_input_size(img_size=(side, side))
        return top1(model, self.images[side]["validation"])

    def _weights(self, name: str, seed: int) -> Path:
        return self.runs / f"{folder_of(name)}.{seed}.pth"


def _resized(images: Mapping[str, Images], side: int) -> dict[str, Images]:
    return {split: resized(part, side) for split, part in images.items()}


def _later_epochs(options: LargerImages) -> int:
    """The epochs on larger images."""
    return max(1, options.epochs // _SHARE_OF_EPOCHS)


def _accuracy(side: int) -> Column:
    """The column of the accuracy on images of a size."""
    return Column(f"top-1 at {side}", lambda records: spread([record["top1"][str(side)] for record in records]))


def columns(options: LargerImages, facts: Record) -> list[Column]:
    """The columns of the table."""
    trained = Column("trained at", lambda records: str(records[0]["trained"]))
    return [Column("model", known=str), trained, PARAMETERS, *map(_accuracy, options.sides), SEEDS, MINUTES]


def measured(options: LargerImages, data: Data, compared: Results) -> Record:
    """The fact ``measured``: the rows of Table 3 as ``measured.json`` has them."""
    rows = {"Deit base": DEIT_LARGER, FINE_TUNED: FINE_TUNED, RANDOM: RANDOM}
    side, counts = str(options.larger), data.facts["counts"]
    found = by_model(compared.outcomes, list(rows.values()))
    cells = {
        row: spread([record["top1"][side] for record in found[name]]) for row, name in rows.items() if name in found
    }
    described = (
        f"{data.facts['images']} at {side} x {side} pixels, {options.layers} layers of width {options.width}, "
        f"{counted(_later_epochs(options), 'epoch')}, before which the model of Deit base and {FINE_TUNED} learned "
        f"{counted(options.epochs, 'epoch')} at {options.side} x {options.side}; accuracy on {counts['validation']:,} "
        f"images that are held out, {counted_seeds(found)}"
    )
    limits = _LIMITS.format(learned=counts["train"])
    return {"measured": {"what": described, "cells": cells, "column": "Top1 Acc", "limits": limits}}


def notes(options: LargerImages, facts: Record) -> list[str]:
    """Notes below the table."""
    counts, later = facts["counts"], _later_epochs(options)
    return [
        f"{facts['images']}, {counts['train']:,} images; accuracy on {counts['validation']:,} that are held out, in "
        "per cent, after the last epoch, mean ± standard deviation over seeds",
        f"{options.layers} layers of width {options.width}, patches of {options.patch} x {options.patch}, highest "
        f"learning rate {options.lr:g}, {counted(options.epochs, 'epoch')}, those trained at {options.larger} {later}",
        f"{DEIT_LARGER}: {DEIT} after {later} further epochs; {FINE_TUNED} starts from its weights, without its keys, "
        f"queries, positions and class token: new keys and queries have timm's deviation of 0.02; {RANDOM}: the same "
        "epochs from random weights, which are drawn by their width",
        "at other sizes than that of the training nothing is trained; DeiT's positions are interpolated",
        "alone: a token sees nothing outside of its window; Equation 10: with the entropy of the filters in the loss; "
        "Equation 11: each head selects a token of its window, by Gumbel-softmax",
        _LIMITS.format(learned=counts["train"]),
    ]


def draw(options: LargerImages, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Accuracy by the window, as in Figure 2, and by the size of the images."""
    found = by_model(records, options.models)
    with plt.rc_context(STYLE):
        figure, (windows, sizes) = plt.subplots(1, 2, figsize=(15, 4.2), layout="constrained")
        for place, (alone, label) in enumerate(((False, "with what is outside"), (True, "window alone"))):
            lines = {w: found[window_name(w, alone)] for w in options.windows if window_name(w, alone) in found}
            own = {w: [record["top1"][str(options.side)] for record in of_window] for w, of_window in lines.items()}
            _line(windows, place, label, own)
        windows.set(xlabel="side of the window, tokens", title=f"DAFT-conv, images of {options.side} x {options.side}")
        windows.set_xticks(options.windows)
        widest = window_name(max(options.windows), False)
        for place, name in enumerate((DEIT, DEIT_LARGER, widest, FINE_TUNED, RANDOM)):
            if name in found:
                by_side = {s: [record["top1"][str(s)] for record in found[name]] for s in options.sides}
                _line(sizes, place, f"{name}, trained at {found[name][0]['trained']}", by_side)
        sizes.set(xlabel="side of the evaluated images, pixels", title="by the size of the evaluated images")
        sizes.set_xticks(options.sides)
        for axes in (windows, sizes):
            axes.set_ylabel("accuracy, held-out images, %")
            axes.grid(alpha=0.25)
            legend_beside(axes)
        save(figure, path, dpi=130)


def _line(axes: plt.Axes, place: int, label: str, values: Mapping[int, Sequence[float]]) -> None:
    """A line through the means over seeds, and a dot for each seed."""
    look = style_of(place)
    axes.plot(list(values), [sum(of_seeds) / len(of_seeds) for of_seeds in values.values()], label=label, **look.line)
    for x, of_seeds in values.items():
        axes.plot([x] * len(of_seeds), of_seeds, linestyle="", marker=look.marker, color=look.colour)


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=LargerImages,
    title="DAFT-conv on larger images",
    columns=columns,
    notes=notes,
    prepare=lambda options: prepare_images(options.data_dir, options.out, COMMAND),
    train=lambda options, data: Trainings(options, data).run(),
    measure=measured,
    picture=draw,
    whole={DIGITS: COMMAND},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
