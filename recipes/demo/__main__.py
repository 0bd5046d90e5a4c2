"""``python -m recipes.demo``: train, evaluate and write text with fairseq, train on images with timm, show both."""

import argparse
import time
from pathlib import Path

import pandas as pd

from .. import runs
from . import images, text


def main(arguments: list[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("work/demo"), help="folder for everything (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    options = parser.parse_args(arguments)
    updates, wanted, lengths, step, seconds, epochs = 128, text.SPLITS, (512, 2048, 8192), 4096, 4, 30
    if options.quick:
        updates, wanted, lengths = 3, {"test": 1, "valid": 1, "train": 200_000}, (128,)
        step, seconds, epochs = 128, 0, 1
    out, started = options.out.absolute(), time.monotonic()
    runs.begin(out, ["recipes.demo", f"--quick={options.quick}"])

    print("Text: the interpreter's own standard library", flush=True)
    sizes, counts = text.prepare(out, wanted)
    for split, count in counts.items():
        print(f"  {split:<5}  {count.documents:4d} files  {sizes[split]:9,d} bytes  {count.tokens:8,d} tokens")
    planned = [text.training(architecture, out, updates) for architecture in text.ARCHITECTURES]
    trained = runs.train_all(planned, out, 1, lambda folder: text.read(folder, sizes["test"], counts["test"].tokens))
    for sample in text.samples(out, "flowformer_lm"):
        print("  ----\n  | " + sample.replace("\n", "\n  | "))
    speeds = pd.DataFrame({"model": list(text.ARCHITECTURES)})
    for length in lengths:
        measured = [text.speed(model, length, step, out / "data-bin", seconds) for model in speeds.model]
        speeds[f"{length:,}"] = list(map("{:,.0f}".format, measured))
    summary, digits_peak = images.train(out, epochs)
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
        "Training tokens/s by sequence length": speeds,
        "Handwritten digits, 32 x 32": pd.DataFrame([digits]),
    }
    notes = [
        f"test split: {counts['test'].documents} files, {sizes['test']:,} bytes, all {counts['test'].tokens:,} tokens"
        " scored, an end of file per file included; perplexity is per token",
        "tokens/s: median of fairseq's log; memory: the whole process",
        "1,437 digits to learn from, 360 held out",
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


if __name__ == "__main__":
    main()
