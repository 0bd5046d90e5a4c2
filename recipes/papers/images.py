"""Train all rows of a table of image models in small, beside the published accuracy.

``python -m recipes.papers.images daft 2`` from the checkout's root, on 5,000 of MNIST's digits, or with ``--data-dir``
on any folder of images. Run again, it goes on with the next model.
"""

import argparse
import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import timm
from scipy.stats import kendalltau
from timm.utils import ParseKwargs, random_seed
from torch import nn

import timm_plugin  # noqa: F401  (registers the models)

from ..images import Images, batches, fit, read_images, validate, write_mnist
from ..runs import begin, report, spread, table
from .rows import groups, printed

#: Table -> the columns that are compared; each column has its own model.
TABLES = {
    ("flowformer", "5"): ("TOP-1 ACC.",),
    ("daft", "2"): ("Top1 Acc",),
    ("daft", "6"): ("Top 1 Acc",),
    ("daft", "7"): ("Top 1 Acc",),
    ("daft", "8"): ("11", "15"),
}
#: Epochs of the papers' image models, the side of their grid of patches, and DAFT's window on it.
EPOCHS, GRID, WINDOW = 300, 14, 11
#: Mechanism -> the option that says how many tokens it treats together; in small a quarter of all.
REACHES = {"reformer": "chunk_size", "longformer": "window", "nystrom": "landmarks"}


class Model(NamedTuple):
    """A model of a table."""

    row: str
    column: str
    words: str  # timm's name, and --model-kwargs as train.py takes them
    epochs: int = EPOCHS


def models_of(paper: str, number: str) -> dict[str, Model]:
    """The models of a table by name: one for each column, or for each command of a row."""
    columns, models = TABLES[paper, number], {}
    for row, i, command in (
        (row, i, shlex.split(command))
        for group in groups(paper)[number]
        for row, commands in group["rows"].items()
        for i, command in enumerate(commands)
    ):
        settings, model, *more = command[command.index("recipes/imagenet/train.sh") + 1 :]
        if settings:  # a row that is not of our models has none
            column = columns[i % len(columns)]
            name = f"{row}, {column}" if len(columns) > 1 else f"{row}, {model}" if i else row
            epochs = int(more[1]) if more[:1] == ["--epochs"] else EPOCHS
            models[name] = Model(row, column, model, epochs)
    return models


def size_parser(about: str, out: str) -> argparse.ArgumentParser:
    """The options of small image models."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the trainings and the results")
    parser.add_argument("--data-dir", type=Path, help="images in train/ and validation/, a folder for each class")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    sizes = {"side": 28, "patch": 7, "stage-patch": 4, "width": 48, "layers": 2, "heads": 8, "epochs": 12, "batch": 32}
    for name, default in sizes.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help="of images, patches (of two stages) and models"
        )
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate, of all models")
    return parser


def begun(options: argparse.Namespace) -> dict[str, Images]:
    """Begin or go on in ``--out``, which all options but the number of seeds belong to; the images by split."""
    if options.quick:
        options.epochs, options.seeds = 1, 1
    begin(options.out, [f"{name}={value}" for name, value in vars(options).items() if name not in ("out", "seeds")])
    folder = options.data_dir or options.out / "mnist"
    if options.data_dir is None:
        write_mnist(folder)
    return read_images(folder, options.side)


def recorded(options: argparse.Namespace, models: Sequence[str], train: Callable[[str, int], dict]) -> pd.DataFrame:
    """Every model with every seed, all models with the first seed first; a record is stored when it is complete."""
    records = []
    for seed in range(1, options.seeds + 1):
        for name in models:
            path = options.out / "runs" / f"{''.join(x if x.isalnum() else '_' for x in name)}.{seed}.json"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                started = time.monotonic()
                record = {"model": name, "seed": seed, **train(name, seed), "seconds": time.monotonic() - started}
                path.write_text(json.dumps(record), encoding="utf-8")
                print(f"{name}, seed {seed}: {record['top1']} in {record['seconds']:.0f} s", flush=True)
            records.append(json.loads(path.read_text(encoding="utf-8")))
    return pd.DataFrame(records)


def small_model(words: str, options: argparse.Namespace, side: int) -> tuple[str, dict[str, Any]]:
    """A model of timm in the shape of DeiT-S or of Flowformer's Table 5: name and arguments in the small size."""
    name, _, typed = words.partition(" --model-kwargs ")
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    kwargs = parser.parse_args(["--model-kwargs", *typed.split()] if typed else []).model_kwargs
    if name.endswith("_hier_s"):  # its last two stages; the second has patches of twice the side
        small = {"img_size": side, "patch_size": options.stage_patch, "depths": (1, options.layers - 1)}
        small["embed_dims"] = (options.width // 2, options.width)
        small["num_heads"] = (max(1, options.heads // 2), options.heads)
        if reach := REACHES.get(name.removesuffix("_hier_s")):
            small[reach] = max(1, (side // options.stage_patch) ** 2 // 4)
        if name == "soft_hier_s":
            small["ratio"] = 2  # a landmark for 2 x 2 tokens
        return name, small | kwargs
    grid = side // options.patch
    small: dict[str, Any] = {"img_size": side, "patch_size": options.patch, "embed_dim": options.width}
    if name.startswith("mixer"):
        return name, {**small, "num_blocks": options.layers, "mlp_ratio": (4 * grid**2 / options.width, 4.0), **kwargs}
    small |= {"depth": options.layers, "num_heads": options.width if name == "daft_conv_s" else options.heads}
    if name.startswith("daft_conv"):
        kwargs["window"] = scaled_window(kwargs.get("window", WINDOW), grid / GRID)
    if name.startswith("daft_full"):
        small["bias_dim"] = max(1, options.width // 3)  # as 128 is of 384
    return name, {**small, **kwargs}


def scaled_window(window: int, share: float) -> int:
    """The side of a window on a grid that is ``share`` of the paper's: the nearest odd number."""
    return 2 * int(window * share / 2) + 1


def build(name: str, kwargs: dict[str, Any], images: dict[str, Images], seed: int) -> nn.Module:
    """A model of timm for ``images``, with linear weights by their width, and positions as large as tokens.

    timm draws both with a deviation of 0.02, for hundreds of channels and epochs. With 48 channels the layers then do
    nearly nothing at first, and a short training ends before a model knows where its patches are.
    """
    random_seed(seed)
    learn = images["train"]
    model = timm.create_model(name, in_chans=learn.pixels.shape[1], num_classes=int(learn.labels.max()) + 1, **kwargs)
    for part, module in model.named_modules():
        if isinstance(module, nn.Linear) and not part.startswith("head"):
            nn.init.xavier_uniform_(module.weight)
    positions = getattr(model, "pos_embed", None)
    if positions is not None:  # a parameter of timm's models, a module of hierarchical ones
        nn.init.normal_(getattr(positions, "weight", positions), std=1.0)
    return model


def top1(model: nn.Module, images: dict[str, Images]) -> float:
    """Per cent of the held-out images that a model classifies correctly; they select nothing."""
    return validate(model, batches(images["validation"]))["top1"]


def order(frame: pd.DataFrame) -> str:
    """Kendall's tau between the models' mean accuracy and the published one, with its p value, in words."""
    means = frame.groupby("model").agg({"top1": "mean", "published": "first"})
    if len(means) < 3:
        return "fewer than three models have no order"
    tau = kendalltau(means.top1, means.published.astype(float))
    return f"Kendall's tau with the published order: {tau.statistic:.2f}, p = {tau.pvalue:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the table."""
    parser = size_parser(__doc__.splitlines()[0], "work/papers/PAPER_TABLE")
    parser.add_argument("paper", choices=sorted({paper for paper, _ in TABLES}))
    parser.add_argument("table", help="5 of flowformer; 2, 6, 7, 8 of daft (3: recipes.papers.larger_images)")
    options = parser.parse_args(arguments)
    if (options.paper, options.table) not in TABLES:
        parser.error(f"TABLE is {options.table}; allowed: {', '.join(map(' '.join, TABLES))}")
    if options.side % options.patch or options.side % options.stage_patch:
        parser.error(f"--side is {options.side}; allowed: whole patches of --patch and of --stage-patch")
    options.out = Path(str(options.out).replace("PAPER_TABLE", f"{options.paper}_{options.table}"))
    images, models = begun(options), models_of(options.paper, options.table)
    cells = {name: printed(options.paper, options.table, one.row, one.column) for name, one in models.items()}

    def train(name: str, seed: int) -> dict[str, Any]:
        model = build(*small_model(models[name].words, options, options.side), images, seed)
        # Fewer for a row that the paper trains less.
        epochs = max(1, round(options.epochs * models[name].epochs / EPOCHS))
        fit(model, images["train"], epochs, options.batch, options.lr, f"{name}, seed {seed}")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return {"parameters": parameters, "top1": top1(model, images), "published": cells[name]}

    best_first = sorted(models, key=lambda name: -float(cells[name]))
    frame = recorded(options, best_first, train)
    columns = {
        "parameters": ("parameters", "first"),
        "top-1, %": ("top1", spread(2)),
        "published": ("published", "first"),
        "seeds": ("seed", "count"),
        "minutes": ("seconds", lambda seconds: f"{seconds.sum() / 60:.1f}"),
    }
    learned, held_out = (len(images[split].labels) for split in ("train", "validation"))
    of_rows = {(one.row, one.column): name for name, one in reversed(models.items())}.values()  # the first of a cell
    notes = [
        f"{options.data_dir or 'MNIST'}, {learned:,} images of {options.side} x {options.side} pixels; accuracy on "
        f"{held_out:,} that are held out, after the last epoch, mean ± deviation over seeds",
        f"{options.layers} layers of width {options.width} in patches of {options.patch} x {options.patch}, "
        f"hierarchical models in two stages, the first of {options.stage_patch} x {options.stage_patch}; "
        f"{options.epochs} epochs; windows are the same part of the grid as in the paper",
        order(frame[frame.model.isin(of_rows)]),
    ]
    report(options.out, {f"Table {options.table} of {options.paper}": table(frame, columns)}, notes, frame)


if __name__ == "__main__":
    main()
