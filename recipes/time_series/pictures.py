"""Draw attention's weights of a series: ``python -m recipes.time_series.pictures --checkpoint FILE --data DIR``.

For one ``flowformer_time_series`` and one series, the picture shows every layer and head: competition, the share of a
step among the sources, and allocation, how much of its aggregated input a step accepts as a sink. For several models or
series it shows the last layers side by side, as Figure 8 of *Flowformer*: Flow-Attention's competition, or for any
other mechanism the sum of the weights that all steps give a step.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt

from common.attention import record_attention
from common.command_parser import CommandParser
from common.files.output_files import check_new
from fairseq_plugin import TimeSeriesClassifier
from fairseq_plugin.data.series_folder import Label, read_split
from fairseq_plugin.models.time_series_hub_interface import TimeSeriesHubInterface

from ..shared.commands import shown_path
from ..shared.plots import STYLE, save
from ..shared.scripts import script
from . import side_by_side


class Weights(NamedTuple):
    """One series, and the weights of its steps in each layer."""

    series: np.ndarray  # (T, C), standardised, as the model reads it
    label: Label
    predicted: Label
    competition: list[np.ndarray]  # per layer, (heads, T), divided by its mean: 1 is an even share
    allocation: list[np.ndarray]  # per layer, (heads, T)


def load(checkpoint: Path) -> TimeSeriesHubInterface:
    """Load the model of a checkpoint.

    Raises:
        ValueError: the file does not exist or does not contain a classifier of time series.
    """
    if not checkpoint.is_file():
        raise ValueError(f"--checkpoint is {checkpoint}, which is no file; allowed: a checkpoint of fairseq-train")
    return TimeSeriesClassifier.from_pretrained(str(checkpoint.parent.absolute()), checkpoint.name)


def weigh(hub: TimeSeriesHubInterface, series: np.ndarray, label: Label) -> Weights:
    """Run the model on one series (T, C) and record the weights; a longer series is cut as in training.

    Raises:
        ValueError: the model has no Flow-Attention, or cannot read the series.
    """
    with record_attention(hub) as records:
        predicted = hub.predict([series], cut=True)[0]
    (prepared,) = hub.prepare([series], cut=True)
    competition = [record.competition[0].float() for record in records]  # (heads, T)
    shares = [(layer / layer.mean(1, keepdim=True)).numpy() for layer in competition]
    allocation = [record.allocation[0].float().numpy() for record in records]
    return Weights(prepared.numpy(), label, predicted, shares, allocation)


def draw(weights: Weights, path: Path) -> None:
    """Write a picture: the channels of the series, and a map (heads, steps) for each layer and kind of weight."""
    layers = len(weights.competition)
    heads = weights.competition[0].shape[0]
    with plt.rc_context(STYLE):
        heights = [2.2, *([0.25 + 0.16 * heads] * layers)]
        size = (10.0, 1.2 + sum(heights))
        figure, grid = plt.subplots(
            layers + 1, 2, figsize=size, height_ratios=heights, sharex=True, squeeze=False, layout="constrained"
        )
        limit = float(np.abs(weights.series).max())
        for axes in grid[0]:
            mappable = axes.imshow(weights.series.T, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit)
            axes.set_title("the series, standardised")
        grid[0, 0].set_ylabel("channel")
        figure.colorbar(mappable, ax=grid[0, :], pad=0.01)
        for column, kind in enumerate(("competition", "allocation")):
            maps = getattr(weights, kind)
            low, high = min(map(np.min, maps)), max(map(np.max, maps))
            for number, (axes, layer) in enumerate(zip(grid[1:, column], maps), 1):
                mappable = axes.imshow(
                    layer, aspect="auto", cmap="viridis", vmin=low, vmax=high, interpolation="nearest"
                )
                axes.set_title(f"{kind}, layer {number}")
                figure.colorbar(mappable, ax=axes, pad=0.01)
                axes.set_ylabel("head")
            grid[-1, column].set_xlabel("step")
        figure.suptitle(f"label {weights.label}, predicted {weights.predicted}; competition: 1 is an even share")
        save(figure, path, dpi=130)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.time_series.pictures", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", type=Path, nargs="+", required=True, metavar="FILE", help="one or more of any NAME_time_series"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder that prepare has written")
    parser.add_argument("--split", default="test", help="default: %(default)s")
    parser.add_argument(
        "--series", type=int, nargs="+", default=[0], metavar="N", help="one or more of the split, from 0, the default"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="of the checkpoints; by default their attention")
    parser.add_argument("--output", type=Path, default=Path("weights.png"), metavar="FILE", help="default: %(default)s")
    return parser


@script("pictures")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    check_new(options.output, "--output")
    if options.names and len(options.names) != len(options.checkpoint):
        raise ValueError(f"--names has {len(options.names)} names; allowed: {len(options.checkpoint)}, a name for each")
    hubs = [load(checkpoint) for checkpoint in options.checkpoint]
    split = read_split(options.data, options.split)
    for number in options.series:
        if not 0 <= number < len(split.series):
            raise ValueError(f"--series is {number}; allowed: 0 to {len(split.series) - 1}, as {options.split} has")
    series, labels = ([values[number] for number in options.series] for values in (split.series, split.labels))
    single = len(hubs) == len(series) == 1 and side_by_side.is_flow(side_by_side.last_attention(hubs[0]))
    with torch.no_grad():
        if single:
            draw(weigh(hubs[0], series[0], labels[0]), options.output)
        else:
            _draw_side_by_side(hubs, series, labels, options)
    print(f"Ready: {shown_path(options.output)}")
    return 0


def _draw_side_by_side(
    hubs: list[TimeSeriesHubInterface], series: list[np.ndarray], labels: list[Label], options: argparse.Namespace
) -> None:
    """Write the picture of several models or series, or of a model without competition."""
    names = options.names or [side_by_side.name_of(side_by_side.last_attention(hub)) for hub in hubs]
    shares = [[side_by_side.weigh(hub, values) for values in series] for hub in hubs]
    prepared = [values.numpy() for values in hubs[0].prepare(series, cut=True)]
    side_by_side.draw(prepared, labels, shares, names, options.output)


if __name__ == "__main__":
    sys.exit(main())
