"""Speed and memory of models beside the published columns of DAFT's Tables 2 to 5: ``--speed`` of their commands."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from .. import runs
from ..runs import DEVICE
from .rows import printed

#: Table -> its columns of speed and of memory; images per second of a forward pass, or iterations per second.
COLUMNS = {
    **dict.fromkeys(("2", "3"), ("Images/Sec", "Mem (GB)")),
    **dict.fromkeys(("4", "5"), ("Iters/Sec", "GB/GPU")),
}


def inference(model: nn.Module, pixels: Tensor) -> Callable[[], Tensor]:
    """A function that classifies images."""
    model, pixels = model.to(DEVICE).eval(), pixels.to(DEVICE)
    return torch.inference_mode()(lambda: model(pixels))


def report(out: Path, number: str, steps: dict[str, Callable], count: int, notes: Sequence[str]) -> None:
    """Time steps of ``count`` images, or of one iteration, in turns, and print the table.

    ``steps`` are by the published row. Ratios are over the first row.
    """
    speed, memory = COLUMNS[number]
    seconds = runs.in_turns(steps)
    found = pd.DataFrame({"model": list(steps)})
    found[speed] = [count / seconds[name] for name in steps]
    found["MiB"] = [runs.peak_bytes(step) / 2**20 for step in steps.values()]
    shown = found[["model"]].copy()
    for column, header, cell in ((speed, speed, "{:,.2f}"), ("MiB", memory, "{:,.1f}")):
        published = pd.Series([float(printed("daft", number, name, header)) for name in steps])
        for title, values, written in ((column, found[column], cell), (f"published {header}", published, "{:g}")):
            shown[title] = values.map(written.format)
            shown[f"{title}, ratio"] = (values / values.iloc[0]).map("{:.2f}".format)
    notes = [
        *notes,
        "models take turns; MiB: the most that a call needs at once, without weights; ratios are over the first row",
        f"device: {DEVICE}, threads: {torch.get_num_threads()}",
    ]
    out.mkdir(parents=True, exist_ok=True)
    runs.report(out, {f"Speed and memory, Table {number} of daft": shown}, notes, found)
