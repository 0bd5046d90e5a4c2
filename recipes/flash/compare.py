"""Train the paper's models on any text, and show perplexity, its cost and seconds per step at several lengths.

``python -m recipes.flash.compare --file any.txt``: equal numbers of parameters, updates and tokens per update;
``--figure 5`` compares what the paper's Figure 5 does, and draws it so. Run it again, and it goes on.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from .. import prepare_text, runs
from ..runs import spread
from .models import ALL_MODELS, DEFAULT_MODELS, FIGURES, FUSED, SHAPE, Shape, equal_widths, masked_name, task_arguments
from .pictures import Curves, draw, seconds_until

#: Table 5: a model, and the same with mixed chunk attention.
_CHANGES = (("flash_quad_lm", "flash_lm"), ("transformer_pp_lm", "mc_transformer_pp_lm"))


def command(options: argparse.Namespace, data: Path, widths: dict[str, int], name: str, length: int, seed: int) -> list:
    """fairseq-train with the paper's optimiser, a learning rate for few updates, and evaluations on the way."""
    updates = options.updates
    return runs.fairseq(
        *("train", data, *task_arguments(options.masked)),
        *Shape(options.width, options.layers, options.heads).arguments(name, widths.get(name)),
        *("--tokens-per-sample", length, "--sample-break-mode", "none", "--max-tokens", options.tokens_per_update),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-06", "--weight-decay", "0.01"),
        *("--clip-norm", "0.1" if ALL_MODELS[name].clipped else "0"),
        *("--lr", "0.003", "--lr-scheduler", "polynomial_decay", "--end-learning-rate", "0"),
        *("--warmup-updates", max(1, updates // 10), "--total-num-update", updates),
        *("--max-update", updates, "--validate-interval", 1_000_000),
        *("--validate-interval-updates", max(10, updates // 10)),
        *("--required-batch-size-multiple", 8, "--no-save", "--seed", seed, "--log-interval", max(1, updates // 40)),
    )


def read(folder: Path) -> dict[str, object]:
    """The perplexity of the valid split after the last update, its curve, and the speed of a complete training."""
    logged = runs.points(folder / "train.log")
    valid = logged[logged.split == "valid"].sort_values("num_updates")
    # An interval with an evaluation is slower, and so is the first one.
    steady = logged[(logged.split == "train_inner") & (logged.split.shift() == "train_inner")]
    return {
        "length": int(folder.name.rsplit(".", 2)[1]),
        "parameters": runs.parameters(folder / "train.log"),
        "perplexity": valid.ppl.iloc[-1],
        "tokens_per_second": steady.wps.median(),
        "curve": valid[["num_updates", "ppl"]].values.tolist(),
    }


def by_length(found: pd.DataFrame, column: str, cell: Callable | str) -> pd.DataFrame:
    """A row for each model and a column for each length, with ``cell`` of the values of all seeds."""
    made = found.pivot_table(index="model", columns="length", values=column, aggfunc=cell, sort=False)
    made.columns = [f"{length:,}" for length in made.columns]
    made = made.fillna("-").reset_index()
    made.insert(0, "title", [ALL_MODELS[name].title for name in made.model])
    return made


def over_fused(found: pd.DataFrame, fused: str) -> pd.DataFrame:
    """Perplexity and time over those of Transformer++ of the same seed."""
    theirs = found[found.model == fused].set_index(["length", "seed"])
    found = found.join(theirs[["perplexity", "step"]], on=["length", "seed"], rsuffix="_fused").dropna()
    found["ratio"] = found.perplexity / found.perplexity_fused
    steps = found.groupby(["model", "length"]).step.median() / found.groupby(["model", "length"]).step_fused.median()
    cells = found.groupby(["model", "length"], sort=False).ratio.agg(spread(2))
    cells += " / " + steps.map("{:.2f}".format).reindex(cells.index)
    return by_length(cells.rename("cell").reset_index(), "cell", "first")


def tables(options: argparse.Namespace, found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Perplexity, seconds, memory, and what follows of them."""
    spelled = masked_name if options.masked else str
    fused = spelled(FUSED)
    perplexity = by_length(found, "perplexity", spread(2))
    perplexity.insert(2, "parameters", found.groupby("model", sort=False).parameters.first().map("{:,}".format).values)
    per_update = f"{options.tokens_per_update:,} tokens"
    made = {
        "Perplexity by sequence length": perplexity,
        f"Seconds per training step of {per_update}": by_length(found, "step", lambda x: f"{x.median():.3f}"),
        "Peak memory of fairseq-train, MiB": by_length(found, "MiB", lambda x: f"{x.max():,.0f}"),
    }
    if fused in set(found.model):
        made["Perplexity / seconds per step, over those of Transformer++"] = over_fused(found, fused)
        curves = curves_of(found)
        sooner = [
            {"model": name, "length": length, "cell": sooner_than(curve, curves.get((fused, length)))}
            for (name, length), curve in curves.items()
        ]
        title = "How many times sooner a model has Transformer++'s last perplexity (the paper's speed-up)"
        made[title] = by_length(pd.DataFrame(sooner), "cell", "first")
    rows = []
    for before, after in ((spelled(x), spelled(y)) for x, y in _CHANGES):
        both = [found[found.model == x].set_index(["length", "seed"]).perplexity for x in (before, after)]
        for length, added in (both[1] - both[0]).dropna().groupby("length"):
            rows.append({"model": before, "length": length, "cell": spread(2)(added)})
    if rows:
        title = "Perplexity added by mixed chunk attention (the paper's Table 5)"
        made[title] = by_length(pd.DataFrame(rows), "cell", "first")
    return made


def curves_of(found: pd.DataFrame) -> Curves:
    """Model and length -> seconds of training without evaluations, and the mean perplexity of all seeds then."""
    curves = {}
    for case, rows in found.groupby(["model", "length"], sort=False):
        curve = pd.DataFrame(itertools.chain(*rows.curve), columns=["update", "ppl"]).groupby("update").ppl.mean()
        curves[case] = [(update * rows.step.median(), ppl) for update, ppl in curve.items()]
    return curves


def sooner_than(curve: list, fused: list | None) -> str:
    """How many times sooner a curve reaches the end of ``fused``."""
    reached = seconds_until(curve, fused[-1][1]) if fused else None
    return "never" if reached is None else f"{fused[-1][0] / reached:.2f}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the models and lengths of ``--figure`` and ``--masked``."""
    parser = runs.parser(__doc__.splitlines()[0], "work/flash/compare")
    parser.add_argument("--file", type=Path, required=True, help="any text in UTF-8, from about 1 MB on")
    parser.add_argument("--figure", type=int, choices=FIGURES, help="of the paper: its models and lengths, and picture")
    parser.add_argument("--masked", action="store_true", help="masked models, as in Figure 5")
    parser.add_argument("--archs", nargs="+", choices=ALL_MODELS, metavar="NAME", help=f"of {', '.join(ALL_MODELS)}")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 512 1024 2048 4096, or a figure's")
    sizes = {"updates": 150, "width": SHAPE.width, "layers": SHAPE.layers, "heads": SHAPE.heads, "vocabulary": 2000}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of every model")
    parser.add_argument("--tokens-per-update", type=int, default=4096, help="or the longest length if that is more")
    parser.add_argument("--steps", type=Path, help="results.json of recipes.flash.speed: seconds of models in turns")
    parser.set_defaults(seeds=1)
    options = parser.parse_args(arguments)
    figure = FIGURES.get(options.figure)
    if options.archs and (figure or len({ALL_MODELS[name].masked for name in options.archs}) > 1):
        parser.error("--archs is given; allowed: without --figure, and causal models alone or masked ones (_mlm) alone")
    if options.masked and figure and figure.masked is False:
        parser.error(f"--masked is given; allowed with --figure {options.figure}: not given")
    masked = options.masked or bool(figure and figure.masked)
    names = figure.models if figure else DEFAULT_MODELS
    options.archs = options.archs or [masked_name(name) if masked else name for name in names]
    options.masked = ALL_MODELS[options.archs[0]].masked
    quick = [64, 128] if options.quick else [512, 1024, 2048, 4096]
    options.lengths = sorted(options.lengths or (figure.lengths if figure and not options.quick else quick))
    options.updates = min(10, options.updates) if options.quick else options.updates
    options.tokens_per_update = max(options.tokens_per_update, options.lengths[-1])
    if options.width % (2 * options.heads) or options.width % 4:
        parser.error(f"--width is {options.width}; allowed: a multiple of 4, and of twice --heads, {options.heads}")
    if figure and options.out == parser.get_default("out"):
        options.out = options.out.with_name(f"figure_{options.figure}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print and draw."""
    options = parsed(arguments)
    counts = prepare_text.subword_data(options.file, options.out, options.vocabulary, masked=False)
    if counts["valid"].tokens < options.lengths[-1]:
        raise SystemExit(f"--file has {counts['valid'].tokens:,} tokens in its valid part; allowed: the longest length")
    data, shape = options.out / "data-bin", Shape(options.width, options.layers, options.heads)
    widths, planned = equal_widths(options.archs, options.lengths[0], shape, options.vocabulary), []
    for seed, length, name in itertools.product(range(1, options.seeds + 1), options.lengths, options.archs):
        words = command(options, data, widths, name, length, seed)
        planned.append(runs.Run(f"{name}.{length}", seed, words, checkpoints=False))
    found = runs.train_all(planned, options.out, options.jobs, read)
    found["model"] = [name.rpartition(".")[0] for name in found.model]
    steps = pd.DataFrame(json.loads(options.steps.read_text())) if options.steps else found
    seconds = options.tokens_per_update / steps.groupby(["model", "length"]).tokens_per_second.median()
    found = found.join(seconds.rename("step"), on=["model", "length"])
    if found.step.isna().any():
        raise SystemExit(f"--steps is {options.steps}; allowed: with all models and lengths that are compared")
    valid = counts["valid"]
    per_word = f"to the power of {valid.tokens / valid.words:.4f} it is that per word"
    notes = [
        f"perplexity of the valid split, {valid.tokens:,} subwords of a vocabulary of {options.vocabulary:,}, "
        f"{'of the 15 % that are masked' if options.masked else per_word}",
        f"after {options.updates} updates of {options.tokens_per_update:,} tokens; seeds: {options.seeds}",
        "seconds: of recipes.flash.speed, models in turns" if options.steps else "seconds: of fairseq's log",
    ]
    runs.report(options.out, tables(options, found), notes, found)
    draw(options, found, curves_of(found))


if __name__ == "__main__":
    main()
