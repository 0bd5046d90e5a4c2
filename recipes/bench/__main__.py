"""Speed and memory beside what one would use instead: ``python -m recipes.bench --help``, or ``make bench``."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from ..commands import shown
from ..tables import as_markdown, as_text
from ..text_files import positive
from . import machine, picture, report
from .cases import CASES
from .measure import measure
from .records import FAILED, NOT_RUN, Record, Results, save
from .work import Case, Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
_HEAD = "# Results of the benchmark\n\nWritten by the command at the end; see [how it is measured](../README.md)."


def parser() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone; --list names them")
    parser.add_argument("--list", action="store_true", help="name the cases, with their sizes, and stop")
    parser.add_argument("--quick", action="store_true", help="few and small sizes, which reach no target")
    parser.add_argument("--threads", type=positive, help="of torch, for all forms (default: torch's own)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--out", type=Path, default=Path("work/bench"), help="for the results (%(default)s)")
    return parser


def chosen(only: list[str] | None) -> list[Case]:
    """The cases called ``only``, all if None, in the order of the registry.

    Raises:
        ValueError: a name that no case has.
    """
    for name in only or ():
        if name not in CASES:
            raise ValueError(f"--only is given {name}; allowed: {', '.join(CASES)}")
    return [case for name, case in CASES.items() if only is None or name in only]


def settings_of(options: argparse.Namespace) -> Settings:
    """What all cases share.

    Raises:
        ValueError: a device that is not there.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, of which torch finds none; allowed here: cpu")
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return Settings(options.device, DTYPES[dtype], options.quick)


def run(cases: list[Case], settings: Settings, keep: Callable[[list[Record]], None]) -> list[Record]:
    """Measure ``cases`` one size after another, giving ``keep`` all there is after each; Ctrl-C ends it with that."""
    records: list[Record] = []
    work = []
    for case in cases:
        if settings.device in case.devices:
            work += [(case, size) for size in case.sizes_of(settings)]
        else:
            records.append(Record(case.name, 0, "", "all forms", NOT_RUN, _wrong_device(case)))
    with tqdm(work, unit=" sizes", disable=None) as bar:
        try:
            for case, size in bar:
                bar.set_description(f"{case.name}, {size:,} {case.axis}")
                records += measure(case, size, settings)
                keep(records)
        except KeyboardInterrupt:
            records.append(
                Record("all", 0, "", "all forms", FAILED, "interrupted: what was measured until now follows")
            )
    return records


def _wrong_device(case: Case) -> str:
    needed = " or ".join(case.devices)
    there = "cuda" not in case.devices or torch.cuda.is_available()
    return f"needs --device {needed}" if there else "no CUDA device"


def write(out: Path, results: Results) -> str:
    """results.txt, .md and .json and pictures in ``out``; returns the text."""
    blocks, foot = report.tables(results), report.run_of(results)
    plain = as_text(blocks, foot)
    (out / "results.txt").write_text(plain + "\n", encoding="utf-8")
    save(results, out / "results.json")
    pictures = [f"![{CASES[path.stem].title}]({path.name})" for path in picture.draw(results, out)]
    # A terminal shows the end of a text, a page its beginning.
    blocks = sorted(blocks, key=lambda block: block.title != report.REACH)
    parts = [_HEAD, as_markdown(blocks, foot), *pictures]
    (out / "results.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return plain


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status: 1 where something differed from its reference, or failed."""
    options = parser().parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    started = time.monotonic()
    try:
        cases, settings = chosen(options.only), settings_of(options)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.list:
        for case in cases:
            sizes = ", ".join(f"{size:,}" for size in case.sizes)
            print(f"{case.name:<18} {case.title} ({'/'.join(case.devices)}; {case.axis}: {sizes})")
        return 0
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    here = machine.describe(shlex.join(["python", "-m", "recipes.bench", *given]), settings)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)

    def results_of(records: list[Record]) -> Results:
        return Results(here._replace(minutes=round((time.monotonic() - started) / 60, 1)), records)

    # A machine that goes down leaves the numbers it had.
    records = run(cases, settings, lambda found: save(results_of(found), out / "results.json"))
    results = results_of(records)
    print("\n" + write(out, results))
    print(f"\nThe same as Markdown and JSON, and pictures: {shown(out)}")
    for fault in results.faults():
        print(f"bench: {fault.case}, {fault.form}: {fault.reason}", file=sys.stderr)
    return 1 if results.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
