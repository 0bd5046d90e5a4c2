"""Draw accuracy over runs of timm's train.py: ``python -m recipes.daft.curves --runs DIR... --output FILE``.

As in *A Dot Product Attention Free Transformer*: by epoch (Figure 5, and Figure 6 for fine-tuning), by the side of
DAFT-conv's window, with and without the tokens outside it (``local_only``, Figure 2), or by width (Figure 7).
"""

import csv
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import nn

from common.attention import DaftConvAttention
from common.command_parser import CommandParser
from common.files.output_files import check_new

from ..shared.commands import shown_path
from ..shared.plots import STYLE, legend_beside, save, style_of
from ..shared.scripts import script

AXES = ("epochs", "kernel_size", "width")


class Run(NamedTuple):
    """One output folder of train.py."""

    name: str  # of the folder
    model: str  # timm's name
    epochs: list[int]
    top1: list[float]  # percent on the validation images, after each epoch
    arguments: dict[str, Any]  # for create_model


def read_run(folder: Path) -> Run:
    """Read the summary.csv and args.yaml of a folder.

    Raises:
        ValueError: a file is missing or cannot be read, or no epoch was evaluated.
    """
    for name in ("summary.csv", "args.yaml"):
        if not (folder / name).is_file():
            raise ValueError(f"--runs is {folder}, which has no {name}; allowed: folders of timm's train.py")
    try:
        saved = yaml.safe_load((folder / "args.yaml").read_text(encoding="utf-8"))
        with open(folder / "summary.csv", newline="", encoding="utf-8") as file:
            rows = [(int(row["epoch"]) + 1, float(row["eval_top1"])) for row in csv.DictReader(file)]
        model, arguments = saved["model"], saved.get("model_kwargs") or {}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--runs is {folder}, whose files are not those of train.py: {error!r}") from error
    if not rows:
        raise ValueError(f"--runs is {folder}, whose summary.csv has no epoch; allowed: runs of at least one epoch")
    if saved.get("num_classes"):
        arguments = {"num_classes": saved["num_classes"], **arguments}
    return Run(folder.name, model, *map(list, zip(*rows)), arguments)


def build(run: Run) -> nn.Module:
    """Build the model of a run on torch's meta device, without weights.

    Raises:
        ValueError: timm does not know the model, or the model does not accept the arguments.
    """
    from timm.models import create_model

    import timm_plugin  # noqa: F401  (registers the models)

    try:
        with torch.device("meta"):
            return create_model(run.model, **run.arguments)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"{run.name} cannot be built as {run.model} with {run.arguments}: {error}") from error


def place(run: Run, across: str) -> tuple[str, float]:
    """The label of the line that a run belongs to, and its value on the axis ``across``: kernel_size or width.

    Raises:
        ValueError: the axis is kernel_size, and the model is not DAFT-conv or its windows differ or are not square.
    """
    model = build(run)
    if across == "width":
        return run.model, model.num_features
    windows = {module.window_shape for module in model.modules() if isinstance(module, DaftConvAttention)}
    if len(windows) != 1 or len(set(*windows)) != 1:
        names = sorted(windows) or "none"
        raise ValueError(
            f"{run.name} is of {run.model}, whose windows are {names}; allowed with --across kernel_size: models of "
            "DAFT-conv with one square window"
        )
    local = any(module.local_only for module in model.modules() if isinstance(module, DaftConvAttention))
    return f"{run.model}, {'window alone' if local else 'with what is outside'}", windows.pop()[0]


def check_epochs(runs: Sequence[Run]) -> None:
    """Raise ValueError unless all runs have the same number of epochs; otherwise some may be unfinished."""
    epochs = {run.name: run.epochs[-1] for run in runs}
    if len(set(epochs.values())) > 1:
        shown_epochs = ", ".join(f"{name} {count}" for name, count in epochs.items())
        raise ValueError(
            f"--runs have different numbers of epochs ({shown_epochs}); allowed: one number, or --across epochs"
        )


def draw(runs: Sequence[Run], across: str, best: bool, path: Path) -> None:
    """Write a plot of accuracy over ``across``, one of ``AXES``, after the last or the ``best`` epoch."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.0, 4.2), layout="constrained")
        if across == "epochs":
            for number, run in enumerate(runs):
                axes.plot(run.epochs, run.top1, label=run.name, **style_of(number).curve(len(run.epochs)))
            axes.set(xlabel="epoch", title="accuracy by epoch")
            axes.xaxis.get_major_locator().set_params(integer=True)
        else:
            _draw_lines(axes, runs, across, best)
        axes.set_ylabel("top-1, % of the validation images")
        axes.grid(alpha=0.25)
        legend_beside(axes)
        save(figure, path, dpi=110)


def _draw_lines(axes: Axes, runs: Sequence[Run], across: str, best: bool) -> None:
    """Draw a dot for each run, and a line through the means of runs at the same position."""
    lines: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        line, x = place(run, across)
        lines.setdefault(line, {}).setdefault(x, []).append(max(run.top1) if best else run.top1[-1])
    for number, (line, dots) in enumerate(lines.items()):
        line_style = style_of(number)
        ordered = sorted(dots)
        axes.plot(ordered, [math.fsum(dots[x]) / len(dots[x]) for x in ordered], label=line, **line_style.line)
        for x in ordered:
            axes.plot([x] * len(dots[x]), dots[x], linestyle="", marker=line_style.marker, color=line_style.colour)
    axes.set_xticks(sorted({x for dots in lines.values() for x in dots}))
    when = "after the best epoch, chosen on the same images" if best else "after the last epoch"
    names = {"kernel_size": "side of the window, tokens", "width": "width, channels"}
    axes.set(xlabel=names[across], title=f"accuracy {when}")


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.daft.curves", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, nargs="+", required=True, metavar="DIR", help="folders of timm's train.py, of any size"
    )
    parser.add_argument("--across", choices=AXES, default="epochs", help="the axis to the right (%(default)s)")
    parser.add_argument("--best", action="store_true", help="the best epoch's accuracy in place of the last one's")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), metavar="FILE", help="default: %(default)s")
    return parser


@script("curves")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.best and options.across == "epochs":
        raise ValueError("--best is passed; allowed with --across kernel_size or width")
    check_new(options.output, "--output")
    runs = [read_run(folder) for folder in options.runs]
    if options.across != "epochs":
        check_epochs(runs)
    draw(runs, options.across, options.best, options.output)
    print(f"Ready: {shown_path(options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
