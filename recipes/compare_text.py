"""Train language models with every causal attention on any text, with one budget: perplexity, speed and memory.

``python -m recipes.compare_text --file FILE --seeds 3``. Run it again, and it goes on.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt

from . import models, runs
from .models import NO_POSITIONS
from .runs import spread

#: Softmax attention, and ways to make sums over the past depend on the order of tokens; ``--models gates``.
GATES = (
    *("softmax", f"softmax{NO_POSITIONS}", "linear", "linear+fixed", "linear+learned", "linear+forget"),
    *("linear+forget_channel", "linear+short_conv", "linear+forget+short_conv", f"linear{NO_POSITIONS}"),
    *(f"linear+forget{NO_POSITIONS}", "flow", "flow+fixed", "flow+forget", "flow+short_conv"),
    *("flow+forget+short_conv", "rfa", "rfa+forget", "rfa_gate", "rfa_gate+short_conv"),
)


def draw(found: pd.DataFrame, path: Path) -> None:
    """Perplexity of the valid text over updates, mean and deviation over seeds, and of the test text against speed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for model, rows in found.groupby("model", sort=False):
        curve = pd.concat(pd.DataFrame(rows, columns=["update", "ppl"]) for rows in rows.curve)
        by_update = curve.groupby("update").ppl
        mean, deviation = by_update.mean(), by_update.std().fillna(0)
        (line,) = left.plot(mean, label=model)
        left.fill_between(mean.index, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.2)
        filled = line.get_color() if models.state_is_constant(model) else "none"
        x, y = rows.tokens_per_second.median(), rows.perplexity
        marker = {"fmt": "o", "color": line.get_color(), "markerfacecolor": filled}
        right.errorbar(x, y.mean(), y.std() if len(y) > 1 else None, **marker)
        right.annotate(model, (x, y.mean()), xytext=(5, 3), textcoords="offset points", fontsize=8)
    left.set(xlabel="update", ylabel="perplexity, valid text", yscale="log", title="Mean and deviation over seeds")
    left.legend(fontsize=7, frameon=False, ncols=2)
    right.set(xlabel="training tokens per second, one thread", ylabel="perplexity, test text")
    right.set_title("Mean and deviation over seeds; filled: constant decoding state")
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print and draw."""
    parser = models.parser(__doc__.splitlines()[0], "work/compare_text", models.default_names())
    parser.add_argument("--gates", action="store_true", help="compare gates that forget, in place of --models")
    options = models.parsed(parser, arguments, models.all_names())
    options.models = GATES if options.gates else options.models
    data, tokens, unit = models.text(options)
    planned = [
        runs.Run(name, seed, models.command(options, data, models.model_arguments(options, name), seed))
        for seed, name in itertools.product(range(1, options.seeds + 1), options.models)
    ]
    found = runs.train_all(planned, options.out, options.jobs, models.read)
    shown = runs.table(
        found,
        {
            "parameters": ("parameters", "first"),
            "perplexity": ("perplexity", spread(2)),
            "seeds": ("seed", "count"),
            "tokens/s": ("tokens_per_second", "median"),
            "MiB": ("MiB", "max"),
            "minutes each": ("seconds", lambda seconds: f"{seconds.median() / 60:.1f}"),
        },
    )
    for name in ("parameters", "tokens/s", "MiB"):
        shown[name] = shown[name].map("{:,.0f}".format)
    shown.insert(6, "decoding state", ["constant" if models.state_is_constant(x) else "grows" for x in shown.model])
    notes = [
        f"perplexity of the test text ({unit}), mean ± standard deviation over seeds, of the checkpoint that is best "
        "on the valid text; tokens: " + ", ".join(f"{count:,} {split}" for split, count in tokens.items()),
        f"{options.updates:,} updates of {options.batch_tokens:,} tokens in sequences of {options.tokens_per_sample}, "
        f"{options.layers} layers of width {options.width}, {options.heads} heads, highest rate {options.lr:g} for all",
        f"windows and chunks, where a model has them, are {max(1, options.tokens_per_sample // 4)} tokens",
        *models.notes(options.models),
        "tokens per second in training, and the largest memory of the process, libraries included: of fairseq-train on "
        "one thread of this machine, with whatever else it did",
    ]
    runs.report(options.out, {"Language models with one budget": shown}, notes, found)
    draw(found, options.out / "results.png")


if __name__ == "__main__":
    main()
