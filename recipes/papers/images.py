"""Train all rows of a table of image models in small, beside the published accuracy.

``python -m recipes.papers.images daft 2`` from the checkout's root, on 5,000 of MNIST's digits, or with ``--data-dir``
on any folder of images. Run again, it goes on with the next model.
"""

import argparse
import itertools
import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import timm
import torch
from scipy.stats import kendalltau
from timm.utils import ParseKwargs, random_seed
from torch import nn
from tqdm import tqdm

import timm_plugin  # noqa: F401  (registers the models)

from ..images import Images, batches, fit, read_images, validate, write_mnist
from ..runs import begin, report, spread, table
from . import speed
from .rows import groups, match, printed

#: Table -> the columns that are compared; each column has its own model.
TABLES = {
    ("flowformer", "5"): ("TOP-1 ACC.",),
    ("daft", "2"): ("Top1 Acc",),
    ("daft", "6"): ("Top 1 Acc",),
    ("daft", "7"): ("Top 1 Acc",),
    ("daft", "8"): ("11", "15"),
}
#: Table -> further rows of --models: parts that Flow-Attention loses, as in its ablations, and convolutions of others.
FURTHER = {
    ("flowformer", "5"): {
        "FLOWFORMER W/O COMPETITION": "flowformer_hier_s --model-kwargs competition=none",
        "FLOWFORMER W/O ALLOCATION": "flowformer_hier_s --model-kwargs allocation=none",
        "FLOWFORMER W/O BOTH": "flowformer_hier_s --model-kwargs competition=none allocation=none",
        "NYSTRÖMFORMER W/O CONVOLUTION": "nystrom_hier_s --model-kwargs conv_kernel=0",
        "SOFT W/O CONVOLUTION": "soft_hier_s --model-kwargs conv_kernel=0",
    }
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
    """The models of a table by name: one for each column, or for each command of a row, and those that are further."""
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
    return models | {name: Model(name, "", words) for name, words in FURTHER.get((paper, number), {}).items()}


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
    parser.add_argument("--speed", action="store_true", help="in place of training, time DAFT's Table 2 or 3")
    return parser


def begun(options: argparse.Namespace) -> dict[str, Images]:
    """Begin or go on in ``--out``, which all options but the number of seeds belong to; the images by split."""
    if options.quick:
        options.epochs, options.seeds = 1, 1
    options.out /= "speed" * options.speed
    command = {name: value for name, value in vars(options).items() if name not in ("out", "seeds", "models", "speed")}
    begin(options.out, [f"{name}={value}" for name, value in command.items()])
    folder = options.data_dir or options.out / "mnist"
    if options.data_dir is None:
        write_mnist(folder)
    try:
        return read_images(folder, options.side)
    except ValueError as error:
        raise SystemExit(error) from None


def recorded(out: Path, models: Sequence[str], seeds: Iterable[int], train: Callable[[str, int], dict]) -> pd.DataFrame:
    """Every model with every seed, all models with the first seed first; a record is stored when it is complete."""
    cases = list(itertools.product(seeds, models))
    paths = [out / "runs" / f"{''.join(x if x.isalnum() else '_' for x in name)}.{seed}.json" for seed, name in cases]
    bar = tqdm(total=len(cases), initial=sum(path.exists() for path in paths), unit=" trainings", disable=None)
    for path, (seed, name) in zip(paths, cases):
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            started = time.monotonic()
            record = {"model": name, "seed": seed, **train(name, seed), "seconds": time.monotonic() - started}
            path.write_text(json.dumps(record), encoding="utf-8")
            print(f"{name}, seed {seed}: {record['top1']} in {record['seconds']:.0f} s", flush=True)
            bar.update()
    bar.close()
    return pd.DataFrame(json.loads(path.read_text(encoding="utf-8")) for path in paths)


def chosen_rates(
    options: argparse.Namespace, models: Sequence[str], images: Images, trained: Callable[..., nn.Module]
) -> dict[str, float]:
    """Model -> the rate of ``--rates`` with which it is best on a fifth of the training images, after the others."""
    held_out = torch.arange(len(images.labels)) % 5 == 0  # they are in the order of their classes
    learn, test = (Images(images.pixels[of], images.labels[of]) for of in (~held_out, held_out))
    trials = {f"{name}, rate {rate:g}": (name, rate) for name in models for rate in options.rates}

    def trial(title: str, seed: int) -> dict[str, Any]:
        name, rate = trials[title]
        return {"of": name, "rate": rate, "top1": top1(trained(name, seed, rate, learn), test)}

    found = recorded(options.out, list(trials), [0], trial)
    best = found.loc[found.groupby("of").top1.idxmax()]
    return dict(zip(best.of, best.rate))


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


def top1(model: nn.Module, images: Images) -> float:
    """Per cent of images that a model classifies correctly."""
    return validate(model, batches(images))["top1"]


def order(frame: pd.DataFrame) -> str:
    """Kendall's tau between the models' mean accuracy and the published one, with its p value, in words."""
    means = frame.groupby("model").agg({"top1": "mean", "published": "first"})
    if len(means) < 3:
        return "fewer than three models have no order"
    tau = kendalltau(means.top1, means.published.astype(float))
    return f"Kendall's tau with the published order: {tau.statistic:.2f}, p = {tau.pvalue:.3f}"


def of_models(options: argparse.Namespace) -> str:
    """The size of images and models, for below a table."""
    return (
        f"{options.layers} layers of width {options.width}, {options.heads} heads; images of {options.side} x "
        f"{options.side} pixels in patches of {options.patch} x {options.patch}, and of {options.stage_patch} x "
        f"{options.stage_patch} in the first of two stages of hierarchical models; windows are the same part of the "
        "grid as in the paper"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the table."""
    parser = size_parser(__doc__.splitlines()[0], "work/papers/PAPER_TABLE")
    parser.add_argument("paper", choices=sorted({paper for paper, _ in TABLES}))
    parser.add_argument("table", help="5 of flowformer; 2, 6, 7, 8 of daft (3: recipes.papers.larger_images)")
    parser.add_argument("--models", nargs="+", default=[], metavar="ROW", help="default: all that are published")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="in place of --lr: each row's best on a fifth of the training images"
    )
    options = parser.parse_args(arguments)
    if (options.paper, options.table) not in TABLES:
        parser.error(f"TABLE is {options.table}; allowed: {', '.join(map(' '.join, TABLES))}")
    if options.side % options.patch or options.side % options.stage_patch:
        parser.error(f"--side is {options.side}; allowed: whole patches of --patch and of --stage-patch")
    options.out = Path(str(options.out).replace("PAPER_TABLE", f"{options.paper}_{options.table}"))
    models = models_of(options.paper, options.table)
    plain = [name for name in models if models[name].column]
    chosen = [*dict.fromkeys(row for name in options.models for row in match(name, models) or [f"no {name}"])] or plain
    if wrong := set(chosen).difference(models):
        parser.error(f"--models has {', '.join(wrong)}; allowed: {'; '.join(models)}")
    if options.speed and (options.paper, options.table) != ("daft", "2"):
        parser.error(f"--speed is given with {options.paper} {options.table}; allowed: with daft 2")
    images = begun(options)
    cells = {
        name: printed(options.paper, options.table, *models[name][:2]) if name in plain else "-" for name in chosen
    }
    if options.speed:
        pixels = images["validation"].pixels[: options.batch]
        built = {name: build(*small_model(models[name].words, options, options.side), images, 1) for name in chosen}
        steps = {name: speed.inference(model, pixels) for name, model in built.items()}
        return speed.report(options.out, "2", steps, len(pixels), [f"{len(pixels)} images", of_models(options)])

    def trained(name: str, seed: int, rate: float, learn: Images) -> nn.Module:
        model = build(*small_model(models[name].words, options, options.side), images, seed)
        # Fewer for a row that the paper trains less.
        epochs = max(1, round(options.epochs * models[name].epochs / EPOCHS))
        fit(model, learn, epochs, options.batch, rate, f"{name}, seed {seed}")
        return model

    rates = chosen_rates(options, chosen, images["train"], trained) if options.rates else {}

    def train(name: str, seed: int) -> dict[str, Any]:
        rate = rates.get(name, options.lr)
        model = trained(name, seed, rate, images["train"])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return {
            "parameters": parameters,
            "rate": rate,
            "top1": top1(model, images["validation"]),
            "published": cells[name],
        }

    best_first = sorted(chosen, key=lambda name: -float(cells[name]) if cells[name] != "-" else 0.0)
    frame = recorded(options.out, best_first, range(1, options.seeds + 1), train)
    columns = {
        "parameters": ("parameters", "first"),
        "top-1, %": ("top1", spread(2)),
        "published": ("published", "first"),
        "rate": ("rate", lambda rates: f"{rates.iloc[0]:g}"),
        "seeds": ("seed", "count"),
        "minutes": ("seconds", lambda seconds: f"{seconds.sum() / 60:.1f}"),
    }
    learned, held_out = (len(images[split].labels) for split in ("train", "validation"))
    of_rows = {(models[name].row, models[name].column): name for name in reversed(plain)}.values()  # first of a cell
    notes = [
        f"{options.data_dir or 'MNIST'}, {learned:,} images; accuracy on {held_out:,} that are held out, after "
        f"{options.epochs} epochs, mean ± deviation over seeds",
        of_models(options),
        order(frame[frame.model.isin(of_rows)]),
    ]
    if rates:
        notes.append(f"rates are chosen of {options.rates} on a fifth of the images to learn from")
    report(options.out, {f"Table {options.table} of {options.paper}": table(frame, columns)}, notes, frame)


if __name__ == "__main__":
    main()
