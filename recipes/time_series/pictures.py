"""Draw what attention weighs in a series: ``python -m recipes.time_series.pictures --checkpoint FILE --data DIR``.

For one Flowformer and one series, competition and allocation of every layer and head. For several models or series,
the last layers side by side, as Figure 8 of *Flowformer*: competition, or the sum of the weights that a step gets.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt

from common.attention import InnerAttention, record_attention
from common.modules import GatedAttentionUnit
from fairseq_plugin import TimeSeriesClassifier
from fairseq_plugin.data.series_folder import read_split

from ..runs import new_file


def last_attention(hub) -> torch.nn.Module:
    """The mechanism of the last layer, not a module that wraps one."""
    modules = [module for module in hub.model.modules() if isinstance(module, (InnerAttention, GatedAttentionUnit))]
    return [x for x in modules if not any(isinstance(part, InnerAttention) for part in x.children())][-1]


def draw_one(hub, series: np.ndarray, path: Path) -> None:
    """Every layer and head of a Flowformer."""
    with record_attention(hub) as records:
        predicted = hub.predict([series], cut=True)[0]
    (prepared,) = hub.prepare([series], cut=True)
    figure, grid = plt.subplots(len(records) + 1, 2, figsize=(10, 3 + 1.8 * len(records)), layout="constrained")
    for axes in grid[0]:
        figure.colorbar(axes.imshow(prepared.numpy().T, aspect="auto", cmap="RdBu_r"), ax=axes)
        axes.set(title="the series, standardised", ylabel="channel")
    for column, kind in zip(grid.T, ("competition", "allocation")):
        for number, (axes, record) in enumerate(zip(column[1:], records), 1):
            weights = getattr(record, kind)[0].float()
            weights = weights / weights.mean(1, keepdim=True) if kind == "competition" else weights
            figure.colorbar(axes.imshow(weights, aspect="auto", interpolation="nearest"), ax=axes)
            axes.set(title=f"{kind}, layer {number}", ylabel="head")
    figure.suptitle(f"predicted {predicted}; competition: 1 is an even share")
    figure.savefig(path, dpi=130)


def draw_beside(hubs: dict, chosen: list[np.ndarray], labels: list, path: Path) -> None:
    """The weights of the steps of each series in the last layer of each model, divided by their mean."""
    figure, grid = plt.subplots(2, len(chosen), figsize=(1.5 + 4.2 * len(chosen), 6), squeeze=False, sharex="col")
    for (above, below), series, label in zip(grid.T, chosen, labels):
        (prepared,) = next(iter(hubs.values())).prepare([series], cut=True)
        above.imshow(prepared.numpy().T, aspect="auto", cmap="RdBu_r")
        wrong = []
        for name, hub in hubs.items():
            attention = last_attention(hub)
            flow = hasattr(attention, "recorded_weights")  # else its weights are the columns of a map
            with record_attention(attention, maps=not flow) as records:
                wrong += [name] * (hub.predict([series], cut=True)[0] != label)
            weights = (records[-1].competition if flow else records[-1].summed)[0].float().mean(0)
            below.plot(weights / weights.mean(), label=name)
        above.set_title(f"label {label}" + (f", not found by {', '.join(wrong)}" if wrong else ""))
        below.set(xlabel="step")
    grid[1, 0].set_ylabel("weight over the mean")
    figure.legend(*grid[1, 0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=90)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Load and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, nargs="+", required=True, help="of any NAME_time_series")
    parser.add_argument("--data", type=Path, required=True, help="what recipes.time_series.data wrote")
    parser.add_argument("--series", type=int, nargs="+", default=[0], help="of the test split, from 0")
    parser.add_argument("--output", type=new_file, default="weights.png")
    options = parser.parse_args(arguments)
    hubs = [TimeSeriesClassifier.from_pretrained(str(x.parent.absolute()), x.name) for x in options.checkpoint]
    split = read_split(options.data, "test")
    chosen, labels = [split.series[i] for i in options.series], [split.labels[i] for i in options.series]
    if len(hubs) == len(chosen) == 1 and hasattr(last_attention(hubs[0]), "recorded_weights"):
        draw_one(hubs[0], chosen[0], options.output)
    else:
        names = [getattr(last_attention(hub), "name", None) or "gated attention unit" for hub in hubs]
        draw_beside(dict(zip(names, hubs)), chosen, labels, options.output)


if __name__ == "__main__":
    main()
