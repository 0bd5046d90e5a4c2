"""Train classifiers of time series, and print accuracy beside Flowformer's Table 6.

``python -m recipes.time_series.compare --dataset JapaneseVowels --seeds 5``, with the authors' training. Run it again,
and it goes on; more seeds and models may be added.
"""

import itertools
import math
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_plugin  # noqa: F401  registers the architectures
from fairseq_plugin.data.series_folder import read_description

from .. import runs
from ..runs import Run, fairseq, spread
from . import data
from .classify import METHODS

SUFFIX = "_time_series"
#: The columns of Table 6 by our names; hist_gradient_boosting, lstm and tcn are not quite the paper's methods.
COLUMNS = (
    "dtw hist_gradient_boosting rocket lstm tcn softmax linear reformer longformer favor yoso soft cosformer flowformer"
).split()


def plan(options, model: str, seed: int) -> Run:
    """A training as in the authors' code, which evaluates on the test series every two epochs; or a fit."""
    if model in METHODS:
        return Run(model, seed, ["-m", "recipes.time_series.classify", options.data, model, "--seed", seed], (), False)
    longest, epochs = options.longest, options.epochs
    chunk = min(256, max(16, 2 ** round(math.log2(longest / 2))))  # about two chunks of a series
    chunks = {"flash": ["--flash-chunk-size", chunk], "mixed_chunk": ["--mixed-chunk-chunk-size", chunk]}
    optimizer = "adam" if options.dataset == "SpokenArabicDigits" else "radam"
    command = fairseq(
        *("train", options.data, "--task", "time_series_classification", "--criterion", "sentence_prediction"),
        *("--arch", model + SUFFIX, *chunks.get(model, ()), *runs.reach_arguments(model, longest), "--seed", seed),
        *("--optimizer", optimizer, "--lr", 0.001, "--lr-scheduler", "fixed", "--clip-norm", 4, "--batch-size", 16),
        *("--max-epoch", epochs, "--valid-subset", "test", "--batch-size-valid", 128),
        *("--validate-interval", 1 if epochs % 2 else 2, "--save-interval", math.gcd(10, epochs)),
        *"--no-epoch-checkpoints --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric".split(),
        *("--log-interval", 10**6),
    )
    return Run(model, seed, command)


def read(folder: Path) -> dict:
    """The accuracy by epoch, after the last one, and the best."""
    logged = runs.points(folder / "train.log")
    accuracies = logged[logged.split == "test"].set_index("epoch").accuracy
    network = "train" in set(logged.split)
    return {
        "accuracies": accuracies.to_dict(),
        "last": accuracies.iloc[-1],
        "best": accuracies.max(),
        "parameters": f"{runs.parameters(folder / 'train.log') / 1e6:.2f} M" if network else "-",
        "minutes": logged.wall.max() / 60 if network else float("nan"),
    }


def draw(found: pd.DataFrame, published: dict[str, str], path: Path) -> None:
    """The accuracy by epoch, the mean over seeds, and the last epoch (hollow) and the best (filled) of each seed."""
    figure, (curves, dots) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for place, (model, rows) in enumerate(found.groupby("model", sort=False)):
        pd.DataFrame(list(rows.accuracies)).mean().plot(ax=curves, label=model)
        dots.plot([place - 0.15] * len(rows), rows["last"], "o", mfc="none", color=f"C{place % 10}")
        dots.plot([place + 0.15] * len(rows), rows["best"], "o", color=f"C{place % 10}")
        dots.plot(place, float(published.get(model, "nan")), "xk", ms=9)
    curves.set(xlabel="epoch", ylabel="accuracy on the test series, %", title="Mean over seeds")
    curves.legend(fontsize=8)
    dots.set_xticks(range(found.model.nunique()), found.model.unique(), rotation=60, ha="right")
    dots.set_title("Each seed: last epoch (hollow), best (filled), and the paper's (cross)")
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    """Train, print and draw."""
    known = [name.removesuffix(SUFFIX) for name in sorted(ARCH_MODEL_REGISTRY) if name.endswith(SUFFIX)]
    usual = [name for name in known if name not in ("flow", "combiner", "quadratic")]
    usual.sort(key=lambda name: name != "flowformer")
    parser = runs.parser(__doc__.splitlines()[0], "work/time_series/compare/DATASET")
    parser.add_argument("--dataset", default="JapaneseVowels", help="of the UEA archive, or of your own with --file")
    parser.add_argument("--file", type=Path, metavar="TS", help="..._TRAIN.ts, with ..._TEST.ts beside it")
    parser.add_argument("--models", nargs="+", choices=[*known, *METHODS], default=usual, metavar="NAME")
    parser.add_argument("--epochs", type=int, help="default: the authors', 100; 400 for PEMS-SF")
    options = parser.parse_args(arguments)
    options.epochs = options.epochs or (2 if options.quick else 400 if options.dataset == "PEMS-SF" else 100)
    options.out = Path(str(options.out).replace("DATASET", options.dataset))
    options.data = options.out / "data"
    runs.begin(options.out, ["recipes.time_series.compare", options.dataset, options.file])
    data.write(options.dataset, options.data, options.file)
    options.longest = read_description(options.data).longest
    pairs = itertools.product(range(1, options.seeds + 1), options.models)
    planned = [
        plan(options, model, seed)
        for seed, model in pairs
        if seed == 1 or model not in ("dtw", "hist_gradient_boosting")
    ]
    found = runs.train_all(planned, options.out, options.jobs, read)
    accuracy = runs.table(
        found,
        {
            "parameters": ("parameters", "first"),
            "last epoch, %": ("last", spread(2)),
            "best epoch, %": ("best", spread(2)),
            "seeds": ("seed", "count"),
            "minutes": ("minutes", spread(1)),
        },
    )
    printed = runs.published("flowformer", "6")
    published = (
        dict(zip(COLUMNS, printed.loc[options.dataset.upper()])) if options.dataset.upper() in printed.index else {}
    )
    accuracy.insert(4, "paper", [published.get(model, "-") for model in accuracy.model])
    notes = [
        f"{options.dataset}: per cent of the test series after {options.epochs} epochs, mean ± deviation over seeds; "
        "the best epoch is chosen on the test series, as by the authors' code",
        "the paper's columns for hist_gradient_boosting, lstm and tcn are XGBoost, an LSTM whose size it does not "
        "state, and an encoder that is trained without labels",
    ]
    runs.report(options.out, {options.dataset: accuracy}, notes, found)
    draw(found, published, options.out / "accuracy.png")


if __name__ == "__main__":
    main()
