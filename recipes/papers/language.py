"""Train all rows of a table as small language models with one budget, beside the published numbers.

``python -m recipes.papers.language flash 1 --file any.txt`` from the checkout's root; with ``--pixels 14`` in place of
a file, images are the text. Run again, it goes on where it was interrupted.

A row keeps what distinguishes it: its architecture, its options, one head or several, a head for each channel. Widths
and windows shrink in proportion. Gated attention units are two for a layer, as in the FLASH paper.
"""

import argparse
import itertools
import math
import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from fairseq import options as fairseq_options
from fairseq.data import Dictionary
from timm.data import ImageDataset

from .. import models, runs
from ..images import SPLITS, read_image, write_mnist
from . import speed
from .rows import groups, match, printed


class Values(NamedTuple):
    """The column of a table that is compared, the length of its sequences, and the forms of its models."""

    column: str
    length: int
    trained: str = ""  # the column of the loss in training; both are bits, not perplexity
    more: Sequence[str] = ()  # of fairseq-train
    masked: bool = False  # whether each row has a masked model, too
    post_norm: bool = False  # whether its models are compared pre-norm and post-norm


REFERENCE = ("--activation-fn", "gelu", "--decoder-learned-pos")  # as recipes/enwik8/train.sh
TABLES = {
    ("flowformer", "4"): Values("PERPLEXITY", 512, post_norm=True),
    ("flash", "1"): Values("PPLX (LM/MLM)", 512, masked=True),
    ("flash", "2"): Values("PPLX (LM/MLM)", 512, masked=True),
    ("daft", "4"): Values("Test loss", 3072, "Train loss", REFERENCE),
    ("daft", "5"): Values("Test bpc", 1024, "Train bpc", REFERENCE),
}


def rows_of(paper: str, number: str, masked: bool) -> dict[str, list[str]]:
    """Row -> its architecture with its options, the best published row first."""
    (group,) = groups(paper)[number]
    words = {row: shlex.split(commands[int(masked)])[2:] for row, commands in group["rows"].items() if commands}
    order = sorted(words, key=lambda row: float(number_of(paper, number, row, TABLES[paper, number].column, masked)))
    return {row: words[row][2 if paper == "flash" else 0 :] for row in order}


def number_of(paper: str, number: str, row: str, column: str, masked: bool) -> str:
    """A published number, of causal or of masked models."""
    return printed(paper, number, row, column).split(" / ")[int(masked)]


def model_arguments(options: argparse.Namespace, words: Sequence[str], values: Values) -> list[object]:
    """The arguments of fairseq-train from which a row is built in small."""
    task = ("--task", "masked_lm", "--criterion", "masked_lm") if options.masked else ("--task", "language_modeling")
    full = ["data", *task, "--arch", *words, "--tokens-per-sample", str(values.length)]
    # Without the model's other defaults: a feed-forward width that is not set is a multiple of the width.
    published = vars(fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), full))
    side = "encoder" if options.masked else "decoder"
    of_units = words[0].startswith("flash")
    width, heads = published[f"{side}_embed_dim"], published[f"{side}_attention_heads"]
    sizes = {
        f"{side}_embed_dim": options.width,
        f"{side}_layers": 2 * options.layers if of_units else options.layers,
        f"{side}_attention_heads": {1: 1, width: options.width}.get(heads, options.heads),
    }
    if not options.masked:
        sizes |= {"decoder_input_dim": options.width, "decoder_output_dim": options.width}
    if published.get(f"{side}_ffn_embed_dim") is not None:
        sizes[f"{side}_ffn_embed_dim"] = round(published[f"{side}_ffn_embed_dim"] * options.width / width)
    for reach in ("daft_window", "local_window"):
        if reach in published:
            sizes[reach] = max(1, round(published[reach] * options.tokens_per_sample / values.length))
    if of_units:
        sizes["flash_query_dim"] = options.width // 2
    if "daft_bias_dim" in published:
        sizes["daft_bias_dim"] = max(1, options.width // 4)  # as 128 is of 512
    if "sparse_stride" in published:  # as the paper of Sparse Transformers chooses it
        sizes["sparse_stride"] = math.isqrt(options.tokens_per_sample)
    return [
        *(*task, "--arch", *words, *values.more),
        *(word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", size)),
        *("--dropout", "0.0", "--tokens-per-sample", options.tokens_per_sample),  # a short training repeats little
        *["--lineartime-post-norm"] * options.post_norm,
    ]


def pixel_text(options: argparse.Namespace) -> Path:
    """A text of images: a line for each, in random order, the grey values of its pixels row by row."""
    folder = options.data_dir or options.out / "mnist"
    if options.data_dir is None:
        write_mnist(folder)
    path = options.out / f"{folder.resolve().name}.{options.pixels}.txt"
    if not path.exists():
        files = [file for split in SPLITS for file, _ in ImageDataset(str(folder / split)).reader.samples]
        random.Random(0).shuffle(files)
        images = (read_image(Path(file), options.pixels, grey=True) for file in files)
        text = "".join(" ".join(map(str, image.ravel())) + "\n" for image in images)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path) -> dict[str, object]:
    """The results that ``models.read`` finds, and bits per token in training, just before that and at the end."""
    found, logged = models.read(folder), runs.points(folder / "train.log")
    trained = logged[logged.split == "train_inner"].set_index("num_updates").loss
    return {**found, "trained": trained[: found["update"]].iloc[-1], "trained_last": trained.iloc[-1]}


def size_of(options: argparse.Namespace) -> str:
    """The size of the models, for below a table."""
    return f"{options.layers} layers of width {options.width}, or twice as many gated attention units"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the table."""
    defaults = {"updates": 2_000, "width": 64, "tokens_per_sample": 128}
    parser = models.parser(__doc__.splitlines()[0], "work/papers/PAPER_TABLE", **defaults)
    parser.add_argument("paper", choices=sorted({paper for paper, _ in TABLES}))
    parser.add_argument("table", help=", ".join(map(" ".join, TABLES)))
    parser.add_argument("--pixels", type=int, metavar="SIDE", help="SIDE x SIDE pixels of images, in place of --file")
    parser.add_argument("--data-dir", type=Path, help="of --pixels: images in train/ and validation/; default: MNIST")
    parser.add_argument("--masked", action="store_true", help="FLASH's masked models, not the causal ones")
    parser.add_argument("--post-norm", action="store_true", help="as in Flowformer's Equation 9")
    parser.add_argument("--speed", action="store_true", help="in place of training, time steps of DAFT's tables")
    options = parser.parse_args(arguments)
    values = TABLES.get((options.paper, options.table))
    if values is None:
        parser.error(f"TABLE is {options.paper} {options.table}; allowed: {', '.join(map(' '.join, TABLES))}")
    if (options.masked and not values.masked) or (options.post_norm and not values.post_norm):
        parser.error("--masked or --post-norm is given; allowed: --masked with flash, --post-norm with flowformer")
    if options.speed and options.paper != "daft":
        parser.error(f"--speed is given with {options.paper} {options.table}; allowed: with daft 4 and 5")
    if (options.file is None) == (options.pixels is None):
        parser.error("allowed: one of --file and --pixels")
    rows = rows_of(options.paper, options.table, options.masked)
    chosen = {row for name in options.models for row in match(name, rows) or [f"no {name}"]} or set(rows)
    if wrong := chosen.difference(rows):
        parser.error(f"--models has {', '.join(wrong)}; allowed: {'; '.join(rows)}")
    chosen = [row for row in rows if row in chosen]
    forms = "_masked" * options.masked + "_post_norm" * options.post_norm
    options.out = Path(str(options.out).replace("PAPER_TABLE", f"{options.paper}_{options.table}{forms}"))
    options.out /= "speed" * options.speed
    if options.quick:
        options.updates, options.seeds, options.limit = 8, 1, options.limit or 400
    if options.pixels:
        options.file, options.words, options.tokens_per_sample = pixel_text(options), True, options.pixels**2 + 1
    data, tokens, unit = models.text(options)
    if options.speed:
        published = groups(options.paper)[options.table][0]["rows"]  # in the paper's order
        timed = [row for row in published if row in chosen and printed("daft", options.table, row, "Iters/Sec") != "-"]
        dictionary, length = Dictionary.load(str(data / "dict.txt")), options.tokens_per_sample
        tokens = torch.randint(4, len(dictionary), (options.batch_tokens // length, length + 1))
        built = {row: models.build(model_arguments(options, rows[row], values), dictionary) for row in timed}
        steps = {row: runs.training_step(model, tokens) for row, model in built.items()}
        notes = [f"loss and gradients of {tokens[:, 1:].numel():,} tokens in sequences of {length}", size_of(options)]
        return speed.report(options.out, options.table, steps, 1, notes)
    planned = []
    for seed, row in itertools.product(range(1, options.seeds + 1), chosen):
        command = models.command(options, data, model_arguments(options, rows[row], values), seed)
        planned.append(runs.Run(row, seed, command))
    found = runs.train_all(planned, options.out, options.jobs, read)
    # Bits per pixel are those of an image with its end.
    of, scale = ("pixel", options.tokens_per_sample / options.pixels**2) if options.pixels else ("token", 1.0)
    columns = {"parameters": ("parameters", "first")}
    measured = {"perplexity": ("perplexity", values.column, 1.0, 2)}
    if values.trained:
        measured = {f"train bits per {of}": ("trained", values.trained, scale, 3)}
        measured |= {f"at the last update, train bits per {of}": ("trained_last", values.trained, scale, 3)}
        measured |= {f"test bits per {of}": ("bits", values.column, scale, 3)}
    for header, (value, column, factor, digits) in measured.items():
        found[value] *= factor
        cells = {row: number_of(options.paper, options.table, row, column, options.masked) for row in found.model}
        found[column] = found.model.map(cells)
        columns |= {header: (value, runs.spread(digits)), f"published {column}": (column, "first")}
    columns |= {
        "update": ("update", "median"),
        "seeds": ("seed", "count"),
        "tokens/s": ("tokens_per_second", "median"),
        "MiB": ("MiB", "max"),
    }
    notes = [
        "of the test text, mean ± deviation over seeds, at the update that is best on the valid text, one of eight",
        f"{sum(tokens.values()):,} {unit}, {options.updates:,} updates of {options.batch_tokens:,} in sequences of "
        f"{options.tokens_per_sample}, {size_of(options)}; highest rate {options.lr:g} for all",
    ]
    title = f"Table {options.table} of {options.paper}"
    shown = runs.table(found, columns)
    for name in ("parameters", "update", "tokens/s", "MiB"):
        shown[name] = shown[name].map("{:,.0f}".format)
    runs.report(options.out, {title: shown}, notes, found)


if __name__ == "__main__":
    main()
