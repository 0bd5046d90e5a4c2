"""Draw what attention weighs in a series: ``python -m recipes.time_series.pictures --checkpoint FILE --data DIR``.

Of one ``flowformer_time_series`` and one series, in every layer and head: competition, the share of a step among the
sources, and allocation, how much of what it gathers a step lets in as a sink. Of several models or series, side by
side as in *Flowformer*, Figure 8: Flow-Attention's competition in the last layer, and of any other mechanism the sum of
what all steps give a step.
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
from common.output_files import check_new
from fairseq_plugin import TimeSeriesClassifier
from fairseq_plugin.data.series_folder import Label, read_split
from fairseq_plugin.models.time_series_hub_interface import TimeSeriesHubInterface

from ..shared.commands import shown_path
from ..shared.plots import STYLE, save
from ..shared.scripts import script
from . import side_by_side


class Weights(NamedTuple):
    """One series, and what each layer weighs its steps by."""

    series: np.ndarray  # (T, C), standardised, as the model reads it
    label: Label
    predicted: Label
    competition: list[np.ndarray]  # of each layer, (heads, T), over its mean: 1 is an even share
    allocation: list[np.ndarray]  # of each layer, (heads, T)


def load(checkpoint: Path) -> TimeSeriesHubInterface:
    """The model of a checkpoint.

    Raises:
        ValueError: the file does not exist or holds no classifier of time series.
    """
    if not checkpoint.is_file():
        raise ValueError(f"--checkpoint is {checkpoint}, which is no file; allowed: a checkpoint of fairseq-train")
    return TimeSeriesClassifier.from_pretrained(str(checkpoint.parent.absolute()), checkpoint.name)


def weigh(hub: TimeSeriesHubInterface, series: np.ndarray, label: Label) -> Weights:
    """The weights of one series (T, C); a longer one is cut as in training.

    Raises:
        ValueError: the model holds no Flow-Attention, or cannot read the series.
    """
    with record_attention(hub) as records:
        predicted = hub.predict([series], cut=True)[0]
    (ready,) = hub.prepare([series], cut=True)
    competition = [record.competition[0].float() for record in records]  # (heads, T)
    shares = [(layer / layer.mean(1, keepdim=True)).numpy() for layer in competition]
    allocation = [record.allocation[0].float().numpy() for record in records]
    return Weights(ready.numpy(), label, predicted, shares, allocation)


def draw(weights: Weights, path: Path) -> None:
    """Write one picture: the channels of the series, and a map of heads by steps for each layer and kind of weight."""
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
            shown = axes.imshow(weights.series.T, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit)
            axes.set_title("the series, standardised")
        grid[0, 0].set_ylabel("channel")
        figure.colorbar(shown, ax=grid[0, :], pad=0.01)
        for column, kind in enumerate(("competition", "allocation")):
            maps = getattr(weights, kind)
            low, high = min(map(np.min, maps)), max(map(np.max, maps))
            for number, (axes, layer) in enumerate(zip(grid[1:, column], maps), 1):
                shown = axes.imshow(layer, aspect="auto", cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
                axes.set_title(f"{kind}, layer {number}")
                figure.colorbar(shown, ax=axes, pad=0.01)
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
    alone = len(hubs) == len(series) == 1 and side_by_side.is_flow(side_by_side.last_attention(hubs[0]))
    with torch.no_grad():
        if alone:
            draw(weigh(hubs[0], series[0], labels[0]), options.output)
        else:
            _draw_side_by_side(hubs, series, labels, options)
    print(f"Ready: {shown_path(options.output)}")
    return 0


def _draw_side_by_side(
    hubs: list[TimeSeriesHubInterface], series: list[np.ndarray], labels: list[Label], options: argparse.Namespace
) -> None:
    """Write the picture of several models, or of one that has no competition."""
    names = options.names or [side_by_side.name_of(side_by_side.last_attention(hub)) for hub in hubs]
    shares = [[side_by_side.weigh(hub, one) for one in series] for hub in hubs]
    ready = [one.numpy() for one in hubs[0].prepare(series, cut=True)]
    side_by_side.draw(ready, labels, shares, names, options.output)


if __name__ == "__main__":
    sys.exit(main())
