"""Speed and memory of our operations and models beside the usual alternatives: ``python -m recipes.bench --list``.

Each candidate is compared with a reference before it is timed. ``LINEARTIME_MECHANISMS=my_idea.py`` in the environment
registers your own mechanism, which ``--only attention_NAME`` then measures.
"""

import argparse
import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib import pyplot as plt
from tqdm import tqdm

from ..runs import begin, report
from . import attentions, gated_attention_unit, images, language_models, on_gpu, operations, translation
from .measure import BACKWARD, TRAINING, Case, Place, measure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Panels of the picture of README's first screen: title, case, run, and two candidates with their labels.
SUMMARY = (
    (
        "Attention, forward and backward\n8 heads of 64 channels, causal",
        "causal_flow",
        BACKWARD,
        {"flow_attention": "Flow-Attention", operations.SOFTMAX: "fused softmax attention"},
    ),
    (
        "Training step of a language model\nwidth 512, FLASH and Transformer++",
        "flash_lm_512",
        TRAINING,
        {"flash_lm": "FLASH (flash_lm)", "transformer_pp_lm": "fused softmax (transformer_pp_lm)"},
    ),
)


def cases() -> dict[str, Case]:
    """All cases by name; a registered attention needs no edit."""
    parts = (operations, on_gpu, language_models, translation, images, gated_attention_unit)
    return {name: case for part in parts for name, case in part.CASES.items()} | attentions.cases()


def table(case: Case, rows: pd.DataFrame) -> pd.DataFrame:
    """The measurements of cases with one title, a row for each run, size and candidate."""
    noisy = rows.noisy.map({True: " ~", False: ""})
    shown = pd.DataFrame({case.axis: rows["size"].map("{:,}".format), "run": rows.run, "candidate": rows.candidate})
    shown["ms"] = rows.ms.map("{:.4g}".format) + noisy
    shown["quartiles"] = rows.low.map("{:.4g} to ".format) + rows.high.map("{:.4g}".format)
    if case.base:
        shown[f"times as long as {case.base}"] = rows.times.map("{:.3g}".format)
    shown[f"{case.unit}/s"] = rows["per second"].map("{:,.4g}".format)
    shown["MiB"] = rows.MiB.map("{:,.1f}".format)
    return shown


def draw(title: str, rows: pd.DataFrame, axis: str, path: Path) -> None:
    """Time of each run and memory of the last one by size."""
    runs = rows.run.unique()
    figure, panels = plt.subplots(1, len(runs) + 1, figsize=(4.5 * (len(runs) + 1), 4), layout="constrained")
    for axes, run, value in zip(panels, (*runs, runs[-1]), (*["ms"] * len(runs), "MiB")):
        lines = rows[rows.run == run].pivot(index="size", columns="candidate", values=value)
        lines.plot(loglog=True, marker="o", ax=axes, xlabel=axis, title=f"{run}, {value}", legend=value == "MiB")
    figure.suptitle(title)
    figure.savefig(path, dpi=75)
    plt.close(figure)


def draw_summary(records: pd.DataFrame, path: Path) -> None:
    """Microseconds per token by length of our two fastest forms beside softmax attention, if both were measured."""
    picture, panels = plt.subplots(1, len(SUMMARY), figsize=(10, 3.6), layout="constrained")
    for axes, (title, case, run, labels) in zip(panels, SUMMARY):
        rows = records[(records.case == case) & (records.run == run) & records.candidate.isin(labels)]
        if rows["size"].nunique() < 2:
            return
        lines = (1e6 / rows.set_index(["size", "candidate"])["per second"]).unstack().rename(columns=labels)
        lines.plot(loglog=True, marker="o", ax=axes, xlabel="tokens", ylabel="µs per token", title=title)
    picture.savefig(path, dpi=75)


def show(out: Path, known: dict[str, Case], records: pd.DataFrame, notes: list[str]) -> None:
    """Print and write a table for each title, and draw a picture of each case with several sizes."""
    records["title"] = records.case.map(lambda name: known[name].title)
    tables = {}
    for title, rows in records[records.run.notna()].groupby("title", sort=False):
        case = known[rows.case.iloc[0]]
        alone = rows.case.nunique() == 1
        tables[title] = table(case, rows if alone else rows[rows.candidate != case.base])
        if alone and rows["size"].nunique() > 1:
            draw(title, rows, case.axis, out / f"{rows.case.iloc[0]}.png")
    if (absent := records[records.reason.notna()]).size:
        tables["Not timed"] = absent[["case", "size", "candidate", "reason"]]
    draw_summary(records, out / "time_per_token.png")
    report(out, tables, notes, records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if a candidate differed from its reference or failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone")
    parser.add_argument("--list", action="store_true", help="name the cases and their sizes, and stop")
    parser.add_argument("--quick", action="store_true", help="one small size of each, and few rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--minutes", type=float, help="begin no further size after these (default: no limit)")
    parser.add_argument(
        "--out", type=Path, help="goes on if it holds a part of this run (default: a new one in work/bench)"
    )
    options = parser.parse_args(arguments)
    known = cases()
    if wrong := set(options.only or ()) - set(known):
        parser.error(f"--only is {', '.join(wrong)}; allowed: {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no such device; allowed here: cpu")
    if options.threads < 1:
        parser.error(f"--threads is {options.threads}; allowed: at least 1")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes}; allowed: more than 0")
    if options.list:
        for name, case in known.items():
            print(f"{name:<24}{case.title} ({case.axis}: {', '.join(f'{size:,}' for size in case.sizes)})")
        return 0
    torch.set_num_threads(options.threads)
    place = Place(options.device, DTYPES[options.dtype or ("bfloat16" if options.device == "cuda" else "float32")])
    out = options.out or Path("work/bench", time.strftime("%Y-%m-%d-%H%M%S"))
    begin(out, ["recipes.bench", *(f"{name}={value}" for name, value in vars(options).items() if name != "out")])

    path = out / "records.json"
    records = json.loads(path.read_text()) if path.exists() else []
    done, started = {(record["case"], record["at"]) for record in records}, time.monotonic()
    chosen = {name: case for name, case in known.items() if options.only is None or name in options.only}
    todo = [
        (name, size)
        for name, case in chosen.items()
        for size in ([case.quick or case.sizes[0]] if options.quick else case.sizes)
        if options.device in case.devices and (name, size) not in done
    ]
    for name, size in (bar := tqdm(todo, unit=" sizes", disable=None)):
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            print(f"bench: {len(todo) - bar.n} sizes are left after {options.minutes:g} minutes: run this again")
            break
        bar.set_description(f"{name}, {size:,}")
        torch.manual_seed(0)
        try:
            rows = measure(chosen[name], size, place, options.quick)
        except Exception as error:  # an error of one case must not lose the others
            rows = [{"candidate": "all", "size": size, "reason": f"failed: {type(error).__name__}: {error}"}]
        gc.collect()  # modules are reference cycles, and the next case may need all the memory
        records += [{"case": name, "at": size, **row} for row in rows]
        path.write_text(json.dumps(records), encoding="utf-8")
    if not records:
        parser.error(f"--only is {' '.join(chosen)}; allowed with --device {options.device}: --list names others")
    columns = dict.fromkeys(("run", "reason", "times", *(name for record in records for name in record)))
    frame = pd.DataFrame(records, columns=list(columns))
    processor = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    machine = f"{processor[0]}, {os.cpu_count()} cores, {options.threads} threads"
    notes = [
        f"{machine}; {place.device}, {str(place.dtype).removeprefix('torch.')}; {time.strftime('%Y-%m-%d')}, "
        f"{(time.monotonic() - started) / 60:.1f} minutes",
        "~: the quartiles are further apart than a tenth of the median; MiB: the peak beyond inputs and results",
    ]
    show(out, known, frame, notes)
    wrong = frame[frame.reason.fillna("").str.contains("^failed|differs")]
    for _, row in wrong.iterrows():
        print(f"bench: {row.case}, {row.candidate}: {row.reason}", file=sys.stderr)
    return int(len(wrong) > 0)


if __name__ == "__main__":
    sys.exit(main())
