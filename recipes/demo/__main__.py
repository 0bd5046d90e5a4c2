"""``python -m recipes.demo``: train, evaluate and write text with fairseq, train on images with timm, show both."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pandas as pd

from .. import runs
from . import images, text

#: Accuracy on held-out digits, in percent, that a trained model must reach.
REQUIRED = 95.0
#: Where recipes/imagenet/scripts.sh puts timm's train.py. The demo downloads nothing.
SCRIPTS = runs.ROOT / "work" / "timm-scripts"


def break_even(speeds: pd.DataFrame, peer: str) -> str:
    """From which of the measured lengths on Flow-Attention is as fast as a peer."""
    faster = speeds.loc["flowformer_lm"] >= speeds.loc[peer]
    slower = faster.index[~faster]
    if not len(slower):
        return f"flowformer_lm is at least as fast as {peer} at every length"
    return f"flowformer_lm is slower than {peer} at {', '.join(f'{length:,}' for length in slower)} tokens"


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 if the digits were not learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("work/demo"), help="folder for everything (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    parser.add_argument(
        "--timm-scripts",
        type=Path,
        metavar="DIR",
        default=SCRIPTS if (SCRIPTS / "train.py").is_file() else None,
        help="train the digits with the train.py of timm in DIR (%(default)s; None: with a loop of timm's parts)",
    )
    options = parser.parse_args(arguments)
    updates, wanted, lengths, step, seconds, epochs = 128, text.SPLITS, (512, 2048, 8192), 4096, 4, 30
    if options.quick:
        updates, wanted, lengths, step, seconds, epochs = (
            3,
            {"test": 1, "valid": 1, "train": 200_000},
            (128,),
            128,
            0,
            1,
        )
    trainer, loop = ["-m", "recipes.demo.train_digits"], "a loop of timm's parts"
    if options.timm_scripts is not None:
        trainer, loop = ["-m", "timm_plugin", options.timm_scripts / "train.py"], "timm's train.py"
        if not trainer[-1].is_file():
            parser.error(f"--timm-scripts is {options.timm_scripts}; allowed: a folder that holds timm's train.py")
    out, started = options.out.absolute(), time.monotonic()
    runs.begin(out, ["recipes.demo", f"--quick={options.quick}", f"--timm-scripts={options.timm_scripts}"])

    print("Text: the interpreter's own standard library", flush=True)
    sizes, counts = text.prepare(out, wanted)
    for split, count in counts.items():
        print(f"  {split:<5}  {count.documents:4d} files  {sizes[split]:9,d} bytes  {count.tokens:8,d} tokens")
    planned = [text.training(architecture, out, updates) for architecture in text.ARCHITECTURES]
    trained = runs.train_all(planned, out, 1, lambda folder: text.read(folder, sizes["test"], counts["test"].tokens))
    for sample in text.samples(out, "flowformer_lm"):
        print("  ----\n  | " + sample.replace("\n", "\n  | "))
    log = out / "lengths.log"

    def measured() -> list[dict]:
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    if len(measured()) < len(lengths) * len(text.ARCHITECTURES):
        command = [
            "-m",
            "recipes.demo.lengths",
            out / "data-bin",
            "--step",
            step,
            "--seconds",
            seconds,
            "--lengths",
            *lengths,
        ]
        runs.run(command, log, os.cpu_count())
    speeds = pd.DataFrame(measured())
    speeds = speeds.drop_duplicates(["model", "length"], keep="last").set_index(["model", "length"])["tokens/s"]
    speeds = speeds.unstack().loc[list(text.ARCHITECTURES)]
    summary, digits_peak = images.train(out, epochs, trainer)
    # The last checkpoint, not the best one: the held-out digits must not select the checkpoint that they test.
    parameters, top1, maps = images.examine(out / "runs" / images.MODEL / "last.pth.tar", out / "digits")

    shown = pd.DataFrame({"architecture": trained.model, "attention": trained.model.map(text.ARCHITECTURES)})
    shown["parameters"] = trained.parameters.map("{:,}".format)
    shown["perplexity"] = trained.perplexity.map("{:.1f}".format)
    shown["bits/byte"] = trained["bits per byte"].map("{:.3f}".format)
    shown["train tokens/s"] = trained["tokens/s"].map("{:,.0f}".format)
    shown["peak memory"] = trained.MiB.map("{:,.0f} MiB".format)
    digits = {"model": images.MODEL, "parameters": f"{parameters:,}", "held-out accuracy": f"{top1:.1f} %"}
    digits |= {"epochs": len(summary), "peak memory": f"{digits_peak:,.0f} MiB"}
    tables = {
        "Language models of Python's standard library, same data and updates": shown,
        "Training tokens/s by sequence length": speeds.map("{:,.0f}".format).rename_axis(columns=None).reset_index(),
        "Handwritten digits, 32 x 32": pd.DataFrame([digits]),
    }
    notes = [
        f"test split: {counts['test'].documents} files, {sizes['test']:,} bytes, all {counts['test'].tokens:,} tokens"
        " scored, an end of file per file included; perplexity is per token",
        "tokens/s: median of fairseq's log; memory: the whole process",
        *(break_even(speeds, peer) for peer in text.ARCHITECTURES if peer != "flowformer_lm"),
        f"1,437 digits to learn from, 360 held out; trained by {loop}; required: {REQUIRED:.0f} %",
        f"{(time.monotonic() - started) / 60:.1f} minutes",
    ]
    figure = runs.plt.figure(figsize=(13.5, 10.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.55))
    left, middle, right = above.subplots(1, 3)
    text.draw(left, middle, trained)
    images.draw_losses(right, summary)
    images.draw_maps(below, maps)
    figure.savefig(out / "demo.png", dpi=130)
    runs.report(out, tables, notes, trained)
    if not options.quick and top1 < REQUIRED:
        print(f"The digits were learned to {top1:.1f} %; {REQUIRED:.0f} % are required.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
