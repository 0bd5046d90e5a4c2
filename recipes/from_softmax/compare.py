"""Make linear-time language models of a trained softmax one, in every form: ``python -m recipes.from_softmax.compare``.

A teacher is trained for each seed, its attention is exchanged, and the exchanged models are trained in two stages and
from scratch, all through fairseq-train. Run it again, and it goes on.
"""

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt

from common.files import tensor_files
from fairseq_plugin.convert import convert

from .. import models, positions, runs
from ..runs import Run
from . import needles, stages
from .forms import DEFAULT, PARTS, SOFTMAX, forms
from .forms import add_options as add_form_options
from .measure import WINDOWS, measured
from .stages import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED, cell

#: The checkpoint that a training leaves.
LAST = Path("checkpoints") / "checkpoint_last.pt"
#: Stage -> its part of the name of a training.
_SUFFIXES = {TEACHER: "", EXCHANGED: ".exchanged", TRANSFERRED: ".transfer", DISTILLED: ".distillation"}
_SUFFIXES[SCRATCH] = ".scratch"
#: Stages of which is measured how far back a model reads -> what follows its name in the tables.
_READ_FAR = {TEACHER: "", EXCHANGED: ", untrained", DISTILLED: ", trained"}


def path(options: argparse.Namespace, stage: str, name: str, seed: int) -> Path:
    """The checkpoint of a form in a stage."""
    folder = options.out / "runs" / f"{stages.file_name(name)}{_SUFFIXES[stage]}.{seed}"
    return folder.with_name(f"{folder.name}.pt") if stage == EXCHANGED else folder / LAST


def plan(options: argparse.Namespace, stage: str, name: str, seed: int) -> Run:
    """The training of the teacher, or of a form in a stage or from scratch."""
    last = {"updates": stages.lasts(options, options.updates)[stage], "lr": stages.rate(options, stage)}
    arguments = models.model_arguments(options, SOFTMAX)  # the last value of an option counts
    if stage == TEACHER:
        arguments += ["--arch", "transformer_lm", "--decoder-normalize-before"]
    else:
        arguments += ["--arch", "hybrid_lm", *options.forms[name].arguments()]
    start = path(options, EXCHANGED, name, seed)
    if stage == TRANSFERRED:
        arguments += ["--criterion", "attention_transfer"]
        arguments += ["--lineartime-trained-parameters", options.forms[name].learning]
        if options.forms[name].windowed:
            arguments += ["--transfer-window-dropout", options.window_dropout]
    if stage == DISTILLED:
        start = path(options, TRANSFERRED, name, seed)
        arguments += ["--criterion", "distillation", "--distillation-temperature", 1.0]
        arguments += ["--distillation-weight", stages.WEIGHT]
    if stage in (TRANSFERRED, DISTILLED):
        arguments += ["--finetune-from-model", start, "--teacher", path(options, TEACHER, TEACHER, seed)]
    budget = argparse.Namespace(**{**vars(options), **last})
    command = models.command(budget, options.learned_from, [*arguments, "--disable-validation"], seed, evaluations=4)
    return Run(stages.file_name(name) + _SUFFIXES[stage], seed, command)


def learned(folder: Path) -> dict[str, int]:
    """The number of parameters that a training changed."""
    found = re.search(r"num\. trained: ([\d,]+)", (folder / "train.log").read_text(encoding="utf-8"))[1]
    return {"learned": int(found.replace(",", ""))}


def train(options: argparse.Namespace, stage: str, cases: Iterable[tuple[str, int]]) -> pd.DataFrame:
    """Train a stage of forms or teachers with seeds, and measure it once; a row for each checkpoint with its stage."""
    planned = {(name, seed): plan(options, stage, name, seed) for name, seed in cases}
    found = runs.train_all(list(planned.values()), options.out, options.jobs, learned).set_index(["model", "seed"])
    rows = []
    for (name, seed), one in planned.items():
        if (one.model, seed) not in found.index:  # its training failed
            continue
        for of in (EXCHANGED, TRANSFERRED) if stage == TRANSFERRED else (stage,):
            checkpoint = path(options, of, name, seed)
            results = stages.stored(checkpoint.with_suffix(".json"), measured, checkpoint, options, of in _READ_FAR)
            row = {"model": name, "seed": seed, "stage": of, "learned": found.learned[one.model, seed]}
            rows.append({**row, **results})
    return pd.DataFrame(rows)


def train_stages(options: argparse.Namespace) -> pd.DataFrame:
    """All trainings; a stage of a form only where the one before is complete."""
    teachers = train(options, TEACHER, [(TEACHER, seed) for seed in range(1, options.seeds + 1)])
    cases = [(name, seed) for seed in teachers.seed for name in options.forms]
    for name, seed in cases:
        target = path(options, EXCHANGED, name, seed)
        if not target.exists():
            overrides = options.forms[name].overrides()
            tensor_files.save(convert(path(options, TEACHER, TEACHER, seed), "hybrid_lm", overrides)[0], target)
    first = train(options, TRANSFERRED, cases)
    second = train(options, DISTILLED, dict.fromkeys(zip(first.model, first.seed)))
    scratch = [] if options.no_scratch else [train(options, SCRATCH, cases)]
    return pd.concat([teachers, first, second, *scratch], ignore_index=True)


def losses(trained: pd.DataFrame) -> pd.DataFrame:
    """A row for each form and seed; see ``stages``."""
    rows = trained[trained.model != TEACHER].set_index(["model", "seed"])
    by_stage = {stage: rows[rows.stage == stage] for stage in stages.STAGES if (rows.stage == stage).any()}
    found = by_stage[TRANSFERRED][["learned"]].join([of.test.rename(stage) for stage, of in by_stage.items()])
    found = found.join(by_stage[DISTILLED].filter(PARTS)).reset_index()
    found[TEACHER] = found.seed.map(trained[trained.model == TEACHER].set_index("seed").test)
    return found


def reach(trained: pd.DataFrame, of: str) -> pd.DataFrame:
    """``needles`` or ``positions`` of the teachers and of the forms, untrained and after stage 2; a column for each."""
    groups = trained[trained.stage.isin(_READ_FAR)].groupby("model", sort=False)
    rows = pd.concat([group for _, group in groups], ignore_index=True)
    names = pd.DataFrame({"model": rows.model + rows.stage.map(_READ_FAR), "seed": rows.seed})
    return names.join(pd.DataFrame(list(rows[of])))


def reach_tables(trained: pd.DataFrame, length: int) -> dict[str, pd.DataFrame]:
    """Needles by distance, and perplexity by position from half of the training length on."""
    asked, found = reach(trained, "needles"), reach(trained, "positions")
    ends = {name: end_of(name) for name in list(found)[2:]}
    shown = {name: (name, cell(2)) for name, end in ends.items() if end >= length // 2}
    by_position = runs.table(found, shown)
    means = found.groupby("model", sort=False)[list(ends)].mean()
    trained_on = next(name for name, end in ends.items() if end == length)
    change = 100 * (means.iloc[:, -1] / means[trained_on] - 1)
    by_position["change"] = ["-" if math.isnan(x) else f"{x:+,.0f} %" for x in change]
    by_distance = runs.table(asked, {x: (x, cell(0)) for x in list(asked)[2:]})
    return {"Needles by distance, %": by_distance, "Perplexity by position": by_position}


def end_of(column: str) -> int:
    """The distance of a column, or the end of its positions."""
    return int(column.split()[-1].replace(",", ""))


def draw(options: argparse.Namespace, found: pd.DataFrame, trained: pd.DataFrame) -> None:
    """Perplexity by stage, needles by distance, and perplexity by position; thin: untrained."""
    columns, length = stages.sides(options.forms), options.tokens_per_sample
    size = (6.5 * len(columns), 13)
    figure, grid = plt.subplots(3, len(columns), figsize=size, sharey="row", squeeze=False, layout="constrained")
    for place, (title, names) in enumerate(columns.items()):
        stages.draw_stages(grid[0, place], found, names, math.exp)
        grid[0, place].set_title(title)
        for axes, of in zip(grid[1:, place], ("needles", "positions")):
            means = reach(trained, of).drop(columns="seed").groupby("model", sort=False).mean()
            means.columns = [end_of(name) for name in means]
            axes.plot(means.columns, means.loc[TEACHER], "--", color="0.5", label=TEACHER)
            for i, name in enumerate(names):
                for word, width in (("trained", 1.8), ("untrained", 0.7)):
                    if (row := f"{name}, {word}") in means.index:
                        axes.plot(means.columns, means.loc[row], f"C{i}.-", linewidth=width)
        grid[1, place].set(xlabel="tokens from one marker to the other", ylim=(-3, 103))
        grid[2, place].set(xlabel="tokens before, up to; dotted: the length of training", xscale="log", yscale="log")
        grid[2, place].axvline(length, color="0.4", linestyle=":")
        for axis in (grid[2, place].xaxis, grid[2, place].yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
        grid[2, place].set_xticks([x for x in means if x >= length // 8])
        grid[2, place].set_xticks([], minor=True)
    for axes, label in zip(grid[:, 0], ("perplexity, test text", "needles found, %", "perplexity by position")):
        axes.set_ylabel(label)
    figure.savefig(options.out / "results.png", dpi=130)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with the forms and the longest windows."""
    sizes = {"layers": 4, "updates": 2_000, "width": 64}
    parser = models.parser(__doc__.splitlines()[0], "work/from_softmax/compare", DEFAULT, **sizes)
    stages.add_options(parser)
    add_form_options(parser, DEFAULT)
    parser.add_argument("--window-dropout", type=float, default=0.5, help="see the README")
    parser.add_argument("--needles", type=int, default=0, help="copies of a needle in each sequence of all trainings")
    parser.add_argument("--times", type=int, default=8, help="windows for perplexity by position, in training lengths")
    options = parser.parse_args(arguments)
    if options.quick:  # the test text is longer than the windows
        options.updates, options.times, options.limit = min(20, options.updates), 2, options.limit or 1_000
        options.tokens_per_sample = min(32, options.tokens_per_sample)
    length, most = options.tokens_per_sample, (options.tokens_per_sample - 1) // needles.SIZE
    if options.needles and not 2 <= options.needles <= most:
        parser.error(f"--needles is {options.needles}; allowed: 2 to {most}, which fit into a sequence with text")
    if not 0 <= options.window_dropout <= 1:
        parser.error(f"--window-dropout is {options.window_dropout}; allowed: 0 to 1")
    options.longest = options.times * length
    stages.lasts(options, options.updates)
    options.forms = forms(parser, options, options.layers)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print and draw."""
    options = parsed(arguments)
    added = ("forms", "models", "out", "seeds", "jobs", "no_scratch")  # may be others in the same folder
    runs.begin(options.out, [f"{name}={value}" for name, value in vars(options).items() if name not in added])
    options.data, tokens, unit = models.text(options)
    length, options.learned_from = options.tokens_per_sample, options.data
    windows = positions.windows(positions.read_stream(options.data), length, options.longest, WINDOWS)
    if options.needles:
        options.learned_from = options.out / "needles-bin"
        needles.write_mixed(options.data, options.learned_from, length, options.needles)
    trained = train_stages(options)
    found = losses(trained)
    choices = len(needles.symbols_of(options.data)) - 1
    below = [
        f"perplexity of the test text ({unit}; {', '.join(f'{count:,} {split}' for split, count in tokens.items())}); "
        f"transformer_lm, pre-norm, {options.layers} layers of width {options.width}, {options.heads} heads, "
        f"sinusoids; updates of {options.batch_tokens:,} tokens in sequences of {length:,}",
        *stages.notes(options, options.updates, "updates"),
        f"lolcats: --transfer-window-dropout {options.window_dropout:g} in stage 1",
        f"needles: by the tokens from one marker to the other, in {length:,} tokens; guessing finds "
        f"{100 / choices:.1f} %; copies in a sequence of the trainings: {options.needles}; untrained: exchanged; "
        "trained: after stage 2",
        f"by position: {len(windows):,} windows of {options.longest:,} tokens, one every {length:,}; change: from the "
        "end of the training length to the last column; an attention built for the longest length is not measured",
    ]
    shown = {**stages.tables(found, math.exp), **reach_tables(trained, length)}
    runs.report(options.out, shown, below, found)
    draw(options, found, trained)


if __name__ == "__main__":
    main()
