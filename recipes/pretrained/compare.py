"""Compare training from stock softmax weights with training from random weights, on data that every machine has.

``python -m recipes.pretrained.compare [--file any.txt]`` from the checkout's root: about ten minutes on 2 CPU cores.
Language models through fairseq-train, image models through timm's parts. Run again, it goes on where it was
interrupted.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import timm
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from torch import nn

import timm_plugin  # noqa: F401  (registers the models)
from common.files import tensor_files

from .. import library, prepare_text, runs
from ..images import BATCH, loaders, train_epoch, validate, write_digits

#: A model and its start is MODEL.START. The stock models, and ours from their weights and from random ones.
TEXT_SOURCE, IMAGE_SOURCE = "transformer_lm.random", "deit_tiny_patch16_224.random"
TEXT_NAMES = [f"{model}.{start}" for model in ("flowformer_lm", "linear_lm") for start in ("stock", "random")]
#: One shape for all models of text; ``--decoder-normalize-before`` is for transformer_lm, whose default is post-norm.
TEXT_SHAPE = (
    "--decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128 --decoder-ffn-embed-dim 512 "
    "--decoder-layers 2 --decoder-attention-heads 4 --decoder-normalize-before --share-decoder-input-output-embed "
    "--dropout 0.1"
).split()
#: One shape for all models of images, with 64 patches; arguments of each beside it.
IMAGE_SHAPE: dict[str, Any] = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_classes=10)
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": dict(num_heads=4),
    "flowformer_deit_ti": dict(num_heads=4),
    "daft_full_s": dict(num_heads=4, bias_dim=16),
    "daft_conv_s_h16": dict(num_heads=16, window=5),
}
IMAGE_NAMES = [f"{model}.{start}" for model in list(IMAGE_MODELS)[1:] for start in ("stock", "random")]


def library_text(path: Path) -> Path:
    """1.2 MB of the interpreter's own standard library as one text, written unless it is there."""
    if not path.exists():
        documents: list[str] = []
        for document in library.read_library():
            if sum(len(text.encode()) for text in documents) >= 1_200_000:
                break
            documents.append(document)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(documents), encoding="utf-8", newline="\n")
    return path


def text_command(data: Path, name: str, updates: int, lr: float, source: Path, *more: object) -> list[object]:
    """Python's arguments that train a language model with one validation, at the end."""
    model, start = name.split(".")
    saving = "--no-epoch-checkpoints" if name == TEXT_SOURCE else "--no-save"
    return runs.fairseq(
        *("train", data, "--task", "language_modeling", "--arch", model, *TEXT_SHAPE),
        *("--tokens-per-sample", 512, "--sample-break-mode", "none", "--max-tokens", 4096),
        *("--required-batch-size-multiple", 8),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01", "--clip-norm", "1.0"),
        *("--lr", lr, "--lr-scheduler", "polynomial_decay"),
        *("--warmup-updates", max(1, updates // 10), "--total-num-update", updates, "--max-update", updates),
        *("--validate-interval", 1_000_000, "--seed", 1, "--log-interval", max(1, updates // 20), saving),
        *(["--finetune-from-model", source] if start == "stock" else []),
        *more,
    )


def compare_text(options: argparse.Namespace, data: Path) -> pd.DataFrame:
    """Train the stock model, then ours; losses on the valid split, in bits per token."""
    source = options.out / "runs" / f"{TEXT_SOURCE}.1" / "checkpoints" / "checkpoint_last.pt"

    def planned(name: str, updates: int) -> runs.Run:
        # An update with a learning rate of 0 changes nothing, so the validation after it is that of the start.
        before = text_command(data, name, 1, 0.0, source, "--no-save", "--save-dir", "{folder}/before")
        return runs.Run(name, 1, text_command(data, name, updates, 0.003, source), before)

    def read(folder: Path) -> dict[str, float]:
        logs = {"before": "then.log", "after": "train.log"}
        logged = {name: runs.points(folder / log) for name, log in logs.items()}
        return {name: points[points.split == "valid"].loss.iloc[-1] for name, points in logged.items()}

    stock = runs.train_all([planned(TEXT_SOURCE, options.source_updates)], options.out, 1, read)
    ours = runs.train_all([planned(name, options.updates) for name in TEXT_NAMES], options.out, options.jobs, read)
    return pd.concat([stock, ours])


def build(name: str, checkpoint: Path | None = None) -> nn.Module:
    """An image model in the common shape, with ``checkpoint`` as its pretrained weights unless that is None."""
    random_seed(1)
    overlay = {} if checkpoint is None else dict(pretrained_cfg_overlay=dict(file=str(checkpoint), num_classes=10))
    return timm.create_model(name, pretrained=checkpoint is not None, **overlay, **IMAGE_SHAPE, **IMAGE_MODELS[name])


def train_images(model: nn.Module, folder: Path, epochs: int) -> dict[str, float]:
    """Train; losses on the held-out digits, in nats per image, and the accuracy."""
    random_seed(1)
    learn, hold = loaders(folder, model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05)
    warmup = min(1, epochs - 1)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=warmup)
    before = validate(model, hold)
    for epoch in range(epochs):
        train_epoch(model, learn, optimizer)
        scheduler.step(epoch + 1)
    after = validate(model, hold)
    return {"before": before["loss"], "after": after["loss"], "top1": after["top1"]}


def compare_images(options: argparse.Namespace, folder: Path) -> pd.DataFrame:
    """Train the stock model on the digits in ``folder``, then ours; what has a record is complete."""
    checkpoint = options.out / "runs" / f"{IMAGE_SOURCE}.pth"
    records = []
    for name in (IMAGE_SOURCE, *IMAGE_NAMES):
        path = options.out / "runs" / f"{name}.json"
        if not path.exists():
            model, start = name.split(".")
            built = build(model, checkpoint if start == "stock" else None)
            epochs = options.source_epochs if name == IMAGE_SOURCE else options.epochs
            record = {"model": name, **train_images(built, folder, epochs)}
            if name == IMAGE_SOURCE:
                tensor_files.save(built.state_dict(), checkpoint)
            path.write_text(json.dumps(record), encoding="utf-8")
            print(f"{name}: {record['after']:.3f}", flush=True)
        records.append(json.loads(path.read_text(encoding="utf-8")))
    return pd.DataFrame(records)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the tables."""
    parser = runs.parser(__doc__.splitlines()[0], "work/pretrained")
    parser.add_argument("--file", type=Path, help="any text in UTF-8; default: Python's standard library")
    parser.add_argument("--vocabulary", type=int, default=2000, help="subwords")
    parser.set_defaults(source_updates=300, updates=200, source_epochs=16, epochs=9, seeds=1)
    options = parser.parse_args(arguments)
    if options.seeds != 1:
        parser.error(f"--seeds is {options.seeds}; allowed: 1")
    if options.quick:
        options.source_updates = options.updates = 5
        options.source_epochs = options.epochs = 1
    options.out.joinpath("runs").mkdir(parents=True, exist_ok=True)
    file = options.file or library_text(options.out / "library.txt")
    prepare_text.subword_data(file, options.out / "text", options.vocabulary)
    digits = write_digits(options.out / "images" / "digits")
    found = [
        compare_text(options, options.out / "text" / "data-bin"),
        compare_images(options, options.out / "images" / "digits"),
    ]
    titles = (f"Language models, {file.name}", "Image models, handwritten digits")
    units = (f"bits per token of {options.vocabulary:,} subwords", "nats per image")
    shown, notes = {}, []
    for title, unit, frame in zip(titles, units, found):
        stock, ours = frame.iloc[0], frame.iloc[1:]
        shown[title] = pd.DataFrame(
            {
                "model": ours.model.str.split(".").str[0],
                "started from": ours.model.str.split(".").str[1] + " weights",
                **{name: ours[name].map("{:.3f}".format) for name in ("before", "after")},
                **({"top-1, %": ours.top1.map("{:.1f}".format)} if "top1" in ours else {}),
            }
        )
        notes.append(f"{title}: held-out loss, {unit}; {stock.model.split('.')[0]} itself has {stock.after:.3f}")
    notes += [
        f"after {options.updates} updates of a text, and {options.epochs * (digits['train'] // BATCH)} of images; the "
        f"stock models have {options.source_updates} updates and {options.source_epochs} epochs",
        "a starting point, not the same model: before any update the two differ; one run, one seed",
    ]
    runs.report(options.out, shown, notes, pd.concat(found))


if __name__ == "__main__":
    main()
