"""The picture of README's first screen: time per token by length, and the lengths from which on our model is faster."""

import itertools
import math
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from ..shared.plots import COLOURS, DASHES, STYLE, logarithmic, save
from .cases import language_models, operations
from .harness.records import Results
from .harness.work import BACKWARD, TRAINING

NAME = "time_per_token.png"


class Panel(NamedTuple):
    """Two candidates of one case, drawn together."""

    title: str
    case: str
    run: str
    ours: str
    peer: str


PANELS = (
    Panel(
        f"Attention, forward and backward\n{operations.HEADS} heads of {operations.HEAD_DIM} channels, causal",
        "causal_flow",
        BACKWARD,
        operations.FLOW,
        operations.SOFTMAX,
    ),
    Panel(
        "Training step of a language model\nwidth 512, FLASH and Transformer++",
        "flash_lm_512",
        TRAINING,
        *language_models.TRAINED,
    ),
)
#: Names of the candidates for a reader.
LABELS = {
    operations.FLOW: "Flow-Attention",
    operations.SOFTMAX: "fused softmax attention",
    language_models.TRAINED[0]: "FLASH (flash_lm)",
    language_models.TRAINED[1]: "fused softmax (transformer_pp_lm)",
}


def draw(results: Results, path: Path) -> bool:
    """Write the picture to ``path``; False if a panel has fewer than two lengths."""
    if any(
        len(results.sizes(panel.case, panel.run, name)) < 2 for panel in PANELS for name in (panel.ours, panel.peer)
    ):
        return False
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.6), layout="constrained")
        for panel_axes, panel in zip(axes, PANELS):
            _panel(panel_axes, results, panel)
        axes[0].set_ylabel("microseconds per token")
        save(figure, path, dpi=90, pil_kwargs={"optimize": True})
    return True


def _panel(axes: Axes, results: Results, panel: Panel) -> None:
    for name, colour, dash in zip((panel.ours, panel.peer), COLOURS, DASHES):
        sizes = results.sizes(panel.case, panel.run, name)
        times = [1e6 / results.find(panel.case, size, panel.run, name).per_second for size in sizes]
        axes.plot(sizes, times, linestyle=dash, marker="o", markersize=4, color=colour, label=LABELS[name])
    logarithmic(axes, sizes)
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("tokens")
    length = crossing(results, panel)
    if length is not None:
        axes.axvline(length, color="0.5", linewidth=1)
        axes.text(length, 0.02, f" faster from {length:,} on", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)


def crossing(results: Results, panel: Panel) -> int | None:
    """The length from which on ``panel.ours`` is faster, interpolated along the lines of the picture.

    The shortest measured length if it is always faster; None if it is slower at the longest.
    """
    sizes = results.sizes(panel.case, panel.run, panel.ours)
    speeds = [(size, results.ratio(panel.case, size, panel.run, panel.ours, panel.peer)) for size in sizes]
    speeds = [(size, math.log(speed)) for size, speed in speeds if speed is not None]
    if not speeds or speeds[-1][1] <= 0.0:
        return None
    for (shorter, slow), (longer, fast) in reversed(list(itertools.pairwise(speeds))):
        if slow <= 0.0:
            part = -slow / (fast - slow)
            return round(shorter * (longer / shorter) ** part)
    return speeds[0][0]
