"""Train models with several attentions to act from own data, let them act, and print their returns.

``python -m recipes.offline_rl.compare``: data is collected, Decision Transformers are trained through fairseq-train and
evaluated, as are ``bc`` and ``awac``, which have no attention. Run it again, and it goes on.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
from fairseq.models import ARCH_MODEL_REGISTRY
from matplotlib import pyplot as plt

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import supporting
from fairseq_plugin.data.episode_folder import EpisodeDescription, read_description
from fairseq_plugin.tasks.offline_rl import read_context

from .. import models, runs
from ..runs import Run, fairseq, spread
from .collect import collect
from .evaluate import score

SUFFIX = "_decision"
#: Smaller than the paper's models, which would need a day on a CPU.
SIZES = "--decoder-layers 2 --decoder-embed-dim 64 --decoder-attention-heads 4".split()
#: Models without attention have ten times the updates, each of which costs a fraction.
WITHOUT_ATTENTION = ("bc", "awac")
EPOCHS = 10


def plan(options, name: str, seed: int) -> Run:
    """The authors' training, with a shorter warmup, and whole episodes in smaller batches; then the model acts."""
    plain, architecture = name in WITHOUT_ATTENTION, models.mechanism_of(name) + SUFFIX
    batch = 4 if read_context("--context", options.context) is None else 64
    updates = options.updates * (10 if plain else 1)
    rate, clip = (0.0003, 0) if name == "awac" else (0.001, 0.25)
    additions = [] if plain else models.addition_arguments(name, models.option_prefix(architecture))
    command = fairseq(
        *("train", options.data, "--task", "offline_rl", "--criterion", ARCH_MODEL_REGISTRY[architecture].criterion),
        *("--disable-validation", "--arch", architecture, *additions, "--context", options.context),
        *([] if plain else SIZES),
        *("--batch-size", batch, "--windows-per-epoch", batch * max(1, updates // EPOCHS), "--seed", seed),
        *("--optimizer", "adam", "--weight-decay", 0.0001, "--lr", rate, "--clip-norm", clip),
        *("--lr-scheduler", "fixed", "--warmup-updates", max(1, updates // EPOCHS), "--max-update", updates),
        *("--no-epoch-checkpoints", "--log-interval", max(1, updates // 50)),
    )
    acting = ["-m", "recipes.offline_rl.evaluate", "{folder}/checkpoints/checkpoint_last.pt", "--env", options.env]
    then = [*acting, "--targets", *options.targets, "--episodes", options.episodes, "--json"]
    return Run(name, seed, command, then)


def read(folder: Path) -> dict:
    """The loss while the model learned, the mean return for each target, and how far returns follow targets."""
    logged = runs.points(folder / "train.log").query("split == 'train_inner'").set_index("num_updates")
    errors = logged.get("action_mse", logged.loss)  # of actions in -1 to 1, since the point before
    played = pd.DataFrame(json.loads((folder / "then.log").read_text(encoding="utf-8").strip().splitlines()[-1]))
    returns = played.groupby("target", sort=False).total.mean()
    return {
        "errors": errors.to_dict(),
        "error": errors.iloc[-1],
        "returns": returns.to_dict(),
        "return": returns.iloc[-1],
        "follows": np.corrcoef(returns.index, returns)[0, 1] if returns.nunique() > 1 else 0.0,
        "parameters": f"{runs.parameters(folder / 'train.log') / 1e6:.2f} M",
    }


def draw(options, described: EpisodeDescription, found: pd.DataFrame, path: Path) -> None:
    """Returns by target, mean and deviation over seeds, and the training curves."""
    figure, (returns, curves) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    returns.plot(options.targets, options.targets, color="0.6", label="return = target")
    returns.axhline(described.average, color="0.6", linestyle=":", label="mean of the data")
    returns.axhline(described.highest, color="0.6", linestyle="--", label="best of the data")
    for name, rows in found.groupby("model", sort=False):
        reached = pd.DataFrame(list(rows.returns))
        returns.errorbar(reached.columns, reached.mean(), reached.std().fillna(0), marker="o", capsize=3, label=name)
        pd.DataFrame(list(rows.errors)).mean().plot(ax=curves, logy=True)
    returns.set(xlabel="return asked for", ylabel="return reached", title="Mean and deviation over seeds")
    returns.legend(fontsize=8)
    curves.set(xlabel="update", ylabel="action MSE", title="Training, mean over seeds")
    figure.suptitle(f"{options.env}, own data: context {options.context}, {options.updates} updates")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    """Collect, train, act, print and draw."""
    known = [x for name in supporting("causal") for x in models.with_additions(name)]
    known += [name.replace("flow", "flowformer", 1) for name in known if models.mechanism_of(name) == "flow"]
    known = [x for x in known if models.mechanism_of(x) + SUFFIX in ARCH_MODEL_REGISTRY] + list(WITHOUT_ATTENTION)
    parser = runs.parser(__doc__.splitlines()[0], "work/offline_rl/compare/ENV")
    parser.add_argument("--env", default="HalfCheetah-v5", metavar="NAME", help="of gymnasium")
    usual = ["flowformer", "softmax", "linear"]
    parser.add_argument("--models", nargs="+", choices=known, default=usual, metavar="NAME")
    parser.add_argument("--iterations", type=int, default=160, help="of the search for policies that play the data")
    parser.add_argument("--updates", type=int, default=800, help="of each training; ten times as many of bc and awac")
    parser.add_argument("--context", default="10", metavar="K|full", help="steps of a window")
    parser.add_argument("--episodes", type=int, default=5, help="for each target")
    options = parser.parse_args(arguments)
    grades, episodes = 5, 20
    if options.quick:
        options.iterations, options.updates, options.episodes, grades, episodes = 1, EPOCHS, 1, 2, 2
    options.out = Path(str(options.out).replace("ENV", options.env))
    options.data = options.out / "data"
    runs.begin(options.out, ["recipes.offline_rl.compare", options.env, options.iterations])
    if not (options.data / "episodes.json").exists():
        collect(options.env, options.data, options.iterations, grades, episodes)
    described = read_description(options.data)
    options.targets = np.linspace(described.lowest, described.highest, 5).round(1).tolist()
    planned = [plan(options, name, seed + 1) for seed, name in itertools.product(range(options.seeds), options.models)]
    found = runs.train_all(planned, options.out, options.jobs, read)
    found.loc[found.model.isin(WITHOUT_ATTENTION), "follows"] = 0.0  # they do not read the target
    found["score"] = found["return"].map(lambda total: score(described, total))
    summary = {"parameters": ("parameters", "first"), "action MSE": ("error", spread(4))}
    summary |= {"return": ("return", spread(0)), "score": ("score", spread(1)), "follows": ("follows", spread(2))}
    summary["seeds"] = ("seed", "count")
    by_target = pd.concat([found.model, pd.DataFrame(list(found.returns))], axis=1)
    targets = {f"target {target:,.10g}": (target, spread(0)) for target in options.targets}
    notes = [
        f"{described.name}, which is not D4RL: mean return {described.average:,.0f}, best {described.highest:,.0f}, "
        f"least {described.lowest:,.0f}",
        f"{options.updates} updates (ten times as many of bc and awac, to which any target is the same), context "
        f"{options.context}; {options.episodes} episodes for each target; mean ± deviation over seeds",
        f"return and score: where {options.targets[-1]:,.0f} was asked for; score 0 is the data's least return, 100 "
        "its best; follows: correlation of the returns with their targets",
        *models.notes(options.models),
    ]
    tables = {"Returns": runs.table(found, summary), "Return by target": runs.table(by_target, targets)}
    runs.report(options.out, tables, notes, found)
    draw(options, described, found, options.out / "returns.png")


if __name__ == "__main__":
    main()
