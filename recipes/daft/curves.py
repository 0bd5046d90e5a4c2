"""Draw accuracy over runs of timm's train.py: ``python -m recipes.daft.curves --runs DIR... --output FILE``.

As in *A Dot Product Attention Free Transformer*: by epoch (Figure 5, and Figure 6 for fine-tuning), by the side of
DAFT-conv's window, with and without the tokens outside it (``local_only``, Figure 2), or by width (Figure 7).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import timm
import torch
import yaml

import timm_plugin  # noqa: F401  (registers the models)
from common.attention import DaftConvAttention

from ..runs import new_file, plt

LABELS = {"epochs": "epoch", "kernel_size": "side of the window, tokens", "width": "width, channels"}


def place(folder: Path, across: str) -> tuple[str, float]:
    """The line that a run belongs to, and its value on the axis ``across``: kernel_size or width."""
    saved = yaml.safe_load((folder / "args.yaml").read_text(encoding="utf-8"))
    classes = {"num_classes": saved["num_classes"]} if saved.get("num_classes") else {}
    with torch.device("meta"):
        model = timm.create_model(saved["model"], **{**classes, **(saved.get("model_kwargs") or {})})
    if across == "width":
        return saved["model"], model.num_features
    layers = [module for module in model.modules() if isinstance(module, DaftConvAttention)]
    sides = {side for layer in layers for side in layer.window_shape}
    if len(sides) != 1:
        raise SystemExit(f"{folder} is of {saved['model']}; allowed across kernel_size: DAFT-conv with a square window")
    alone = any(layer.local_only for layer in layers)
    return f"{saved['model']}, {'window alone' if alone else 'with what is outside'}", sides.pop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", required=True, metavar="DIR", help="folders of timm's train.py")
    parser.add_argument("--across", choices=LABELS, default="epochs", help="the axis to the right (%(default)s)")
    parser.add_argument("--best", action="store_true", help="the best epoch's accuracy in place of the last one's")
    parser.add_argument("--output", type=new_file, default="curves.png", help="a new file; default: %(default)s")
    options = parser.parse_args(arguments)
    curves = {folder: pd.read_csv(folder / "summary.csv").set_index("epoch").eval_top1 for folder in options.runs}
    figure, axes = plt.subplots(figsize=(8.0, 4.2), layout="constrained")
    if options.across == "epochs":
        for folder, top1 in curves.items():
            axes.plot(top1.index + 1, top1, label=folder.name)
    else:
        if len({len(top1) for top1 in curves.values()}) > 1:
            parser.error("--runs have different numbers of epochs; allowed: one number, or --across epochs")
        chosen = pd.Series.max if options.best else lambda top1: top1.iloc[-1]
        rows = [(*place(folder, options.across), chosen(top1)) for folder, top1 in curves.items()]
        frame = pd.DataFrame(rows, columns=["line", "x", "top1"])
        for line, dots in frame.groupby("line", sort=False):
            (drawn,) = axes.plot(dots.groupby("x").top1.mean(), label=line)
            axes.plot(dots.x, dots.top1, "o", color=drawn.get_color())
    axes.set(xlabel=LABELS[options.across], ylabel="top-1, % of the validation images")
    axes.legend()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=110)
    print(f"Ready: {options.output}")


if __name__ == "__main__":
    main()
