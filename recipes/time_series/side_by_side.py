"""Pictures of several models' weights of the steps of a series, side by side: *Flowformer*, Figure 8."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from torch import nn

from common.attention import InnerAttention, record_attention
from common.modules import GatedAttentionUnit
from fairseq_plugin.data.series_folder import Label
from fairseq_plugin.models.time_series_hub_interface import TimeSeriesHubInterface

from ..shared.plots import STYLE, save, style_of


class Share(NamedTuple):
    """Weights of the steps of one series in a model's last layer, and the predicted label."""

    predicted: Label
    weights: np.ndarray  # (T,), mean over heads, divided by the mean of all steps: 1 is an even share


def last_attention(hub: TimeSeriesHubInterface) -> nn.Module:
    """The attention of the model's last layer; the mechanism itself, not a module that wraps one."""
    kinds = (InnerAttention, GatedAttentionUnit)
    modules = [module for module in hub.model.modules() if isinstance(module, kinds)]
    return [module for module in modules if not any(isinstance(part, InnerAttention) for part in module.children())][-1]


def is_flow(attention: nn.Module) -> bool:
    """Whether ``attention`` is Flow-Attention, which has competition and allocation."""
    return hasattr(attention, "recorded_weights")


def name_of(attention: nn.Module) -> str:
    """The label of a model in the picture: the name of its mechanism, and the kind of weights."""
    kind = "competition" if is_flow(attention) else "summed weights"
    return f"{getattr(attention, 'name', None) or 'gated attention unit'}, {kind}"


def weigh(hub: TimeSeriesHubInterface, series: np.ndarray) -> Share:
    """The weights of one series (T, C): Flow-Attention's competition, else column sums of the attention matrix."""
    attention = last_attention(hub)
    with record_attention(attention, maps=not is_flow(attention)) as records:
        predicted = hub.predict([series], cut=True)[0]
    weights = records[-1].competition if is_flow(attention) else records[-1].summed
    weights = weights[0].float().mean(0)  # (1, heads, T) -> (T,)
    return Share(predicted, (weights / weights.mean()).numpy())


def draw(
    series: Sequence[np.ndarray],
    labels: Sequence[Label],
    shares: Sequence[Sequence[Share]],
    names: Sequence[str],
    path: Path,
) -> None:
    """Write the picture: a column per standardised series (T, C), and below it the weights of each model."""
    with plt.rc_context(STYLE):
        size = (1.5 + 4.2 * len(series), 5.0 + 0.22 * len(names))
        figure, grid = plt.subplots(
            2, len(series), figsize=size, height_ratios=[2, 3], sharex="col", squeeze=False, layout="constrained"
        )
        limit = max(float(np.abs(values).max()) for values in series)
        top = 1.08 * max(float(share.weights.max()) for row in shares for share in row)
        bottom = min(0.0, *(float(share.weights.min()) for row in shares for share in row))
        for number, (axes, values, label) in enumerate(zip(grid.T, series, labels)):
            mappable = axes[0].imshow(values.T, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit)
            wrong_names = [name.split(",")[0] for name, row in zip(names, shares) if row[number].predicted != label]
            axes[0].set_title(f"label {label}" + (f", not found by {', '.join(wrong_names)}" if wrong_names else ""))
            axes[1].axhline(1, color="#BBBBBB", linewidth=1)
            for index, (name, row) in enumerate(zip(names, shares)):
                axes[1].plot(row[number].weights, label=name, **style_of(index).line)
            axes[1].set(xlabel="step", ylim=(bottom, top))
            axes[1].xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(mappable, ax=grid[0], pad=0.01, label="standardised")
        grid[0, 0].set_ylabel("channel")
        grid[1, 0].set_ylabel("weight over the mean")
        figure.legend(*grid[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle("what the last layer weighs the steps by, the mean over heads; 1 is an even share")
        save(figure, path, dpi=90)
