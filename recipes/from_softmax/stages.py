"""The stages that turn a softmax teacher into a form: options, lengths and rates, the table and the picture.

Results have a row for each form and seed: the test loss of its ``TEACHER``, those after each of ``STAGES`` and with
each of ``forms.PARTS`` after stage 2, as far as they are known; lower is better.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt

from ..runs import spread, table
from .forms import NOTHING, PARTS, SOFTMAX, Form

TEACHER = "teacher"
#: The weight of the teacher in stage 2's loss.
WEIGHT = 0.5
#: All but the first are trainings.
EXCHANGED, TRANSFERRED, DISTILLED, SCRATCH = STAGES = ("exchanged", "after stage 1", "after stage 2", "from scratch")


def parser(about: str, out: str, seeds: int) -> argparse.ArgumentParser:
    """A parser for trainings in this process, one after another."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(out), help="folder of the models and the results")
    made.add_argument("--seeds", type=int, default=seeds, help="trainings of each model")
    made.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return made


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of both stages."""
    parser.add_argument("--transfer-lr", type=float, default=1e-2, help="highest, of stage 1")
    parser.add_argument("--distillation-lr", type=float, default=1e-3, help="highest, of stage 2")
    parser.add_argument("--share", type=float, default=0.2, help="of the teacher's training, both stages")
    parser.add_argument("--no-scratch", action="store_true", help="train no form from scratch")


def lasts(options: argparse.Namespace, whole: int) -> dict[str, int]:
    """Updates or epochs of each training, if the teacher has ``whole``; from scratch as many as both stages."""
    both = round(options.share * whole)
    first = round(both / 2)
    if not 0 < first < both:
        raise SystemExit(f"--share {options.share:g} of {whole} is {both}; allowed: at least 1 in each stage")
    return {TEACHER: whole, TRANSFERRED: first, DISTILLED: both - first, SCRATCH: both}


def rate(options: argparse.Namespace, stage: str) -> float:
    """The highest learning rate of a training."""
    return {TRANSFERRED: options.transfer_lr, DISTILLED: options.distillation_lr}.get(stage, options.lr)


def stored(path: Path, make: Callable[..., dict], *arguments: object) -> dict:
    """The results of a training in a file, which ``make`` makes of ``arguments`` unless it is there."""
    if not path.exists():
        made = json.dumps(make(*arguments))
        path.write_text(made, encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def file_name(name: str) -> str:
    """The name of a form in paths."""
    return re.sub(r"\W+", "-", name)


def cell(digits: int) -> Callable[[pd.Series], str]:
    """Mean and deviation of the known values over seeds as text, "-" without any."""
    return lambda values: spread(digits)(values.dropna()) if values.notna().any() else "-"


def tables(found: pd.DataFrame, shown: Callable[[float], float]) -> dict[str, pd.DataFrame]:
    """The table of the stages, and that of the parts; ``shown`` turns a loss into the number in a table."""
    stages = [stage for stage in STAGES if stage in found]
    gap = (found[EXCHANGED] - found[TEACHER]).where(lambda x: x > 0)
    frame = found[["model", "seed", "learned"]].join(found[stages].map(shown, na_action="ignore"))
    columns = {"learn in stage 1": ("learned", lambda values: f"{values.iloc[0]:,}")}
    columns |= {stage: (stage, cell(2)) for stage in stages}
    shares = {"won back by stage 1, %": TRANSFERRED, "won back, %": DISTILLED, "from scratch, %": SCRATCH}
    for title, stage in shares.items():
        if stage in stages:
            frame[title] = 100 * (found[EXCHANGED] - found[stage]) / gap
            columns[title] = (title, cell(1))
    teachers = found.groupby("seed")[TEACHER].first().map(shown)
    first = pd.DataFrame([{"model": TEACHER, DISTILLED: cell(2)(teachers), "seeds": len(teachers)}])
    rows = pd.concat([first, table(frame, {**columns, "seeds": ("seed", "count")})])
    made = {"From softmax to linear time": rows[["model", *columns, "seeds"]].fillna("-")}
    if NOTHING in found:
        windowed = found.dropna(subset=NOTHING)
        values = windowed[["model", "seed"]].join(windowed[list(PARTS)].map(shown))
        made["Parts of an attention with a window, after stage 2"] = table(values, {x: (x, cell(2)) for x in PARTS})
    return made


def notes(options: argparse.Namespace, whole: int, what: str) -> list[str]:
    """Notes below the table; the teacher has ``whole`` updates or epochs, ``what``."""
    last = lasts(options, whole)
    return [
        f"teacher: {whole:,} {what}, highest learning rate {options.lr:g}; exchanged: its weights under another "
        f"attention; stage 1: attention transfer, {last[TRANSFERRED]:,}, rate {options.transfer_lr:g}, of maps where "
        f"each linear layer has some, else of projections; stage 2: distillation, {last[DISTILLED]:,}, rate "
        f"{options.distillation_lr:g}, temperature 1, weight {WEIGHT}; from scratch: {last[SCRATCH]:,}; mean ± "
        "deviation over seeds, each with its own teacher",
        "won back: (exchanged - converted) / (exchanged - teacher), of losses; from scratch, %: the same of that model",
        window_note(options),
        "parts: with the same weights; the linear part alone sees the tokens of the window too",
    ]


def window_note(options: argparse.Namespace) -> str:
    """A note below a table: the sizes of the forms with a window."""
    return (
        f"lolcats: a softmax window of {options.window} tokens, which weighs {options.window_weight:g} at first; "
        f"lolcats_relu has relu maps; local: such a window alone; longformer: with the first {options.sinks} tokens"
    )


def sides(forms: dict[str, Form]) -> dict[str, list[str]]:
    """The columns of the picture: title -> forms."""
    mixed = {name: SOFTMAX in form.kinds for name, form in forms.items()}
    titles = {"linear time in every layer": False, "with layers of softmax attention": True}
    found = {title: [name for name in mixed if mixed[name] == of] for title, of in titles.items()}
    return {title: names for title, names in found.items() if names}


def draw_stages(axes: plt.Axes, found: pd.DataFrame, names: Sequence[str], shown: Callable[[float], float]) -> None:
    """A line from exchanged to after stage 2 for each form, a dot for training from scratch."""
    axes.axhline(found.groupby("seed")[TEACHER].first().map(shown).mean(), color="0.5", linestyle="--", label=TEACHER)
    stages = [stage for stage in STAGES if stage in found]
    for name in names:
        means = found[found.model == name][stages].map(shown, na_action="ignore").mean()
        (line,) = axes.plot(range(3), means[:3], marker="o", label=name)
        axes.plot(range(3, len(stages)), means[3:], "o", color=line.get_color())
    axes.set_xticks(range(len(stages)), stages)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize=7)
