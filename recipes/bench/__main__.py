"""Speed and memory compared with the usual alternatives: ``python -m recipes.bench --help``, or ``make bench``."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared.commands import shown_path
from ..shared.scripts import command_line, positive_int, script
from ..shared.tables import as_markdown, as_text
from ..shared.working_folder import working_folder, write_text
from . import summary, targets
from .cases import CASES
from .harness import machine, page, picture, report
from .harness.measure import measure
from .harness.records import FAILED, NOT_RUN, Machine, Record, Results, load, save
from .harness.work import Case, Settings

COMMAND = "recipes.bench"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
#: Fields of the machine that may differ between the two parts of an interrupted run.
_OF_A_RUN = ("command", "date", "load", "minutes")
#: The case name of the record that says why the remaining cases were not measured.
_INTERRUPTED = "all"
_HEAD = f"""# Results of the benchmark

Written by the command at the end; see [how it is measured](../README.md).

{page.LEGEND}"""


def parser() -> CommandParser:
    """The benchmark's options."""
    parser = CommandParser(prog="python -m recipes.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone; --list names them")
    parser.add_argument("--list", action="store_true", help="name the cases, with their sizes, and stop")
    parser.add_argument("--quick", action="store_true", help="few and small sizes, which reach no target")
    parser.add_argument("--threads", type=positive_int, help="of torch, the same for all (default: torch's own)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--out", type=Path, default=Path("work/bench"), help="for the results (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out that was interrupted")
    return parser


def chosen(only: list[str] | None) -> list[Case]:
    """The cases named in ``only``, or all, in the order of the registry.

    Raises:
        ValueError: no case has such a name.
    """
    for name in only or ():
        if name not in CASES:
            raise ValueError(f"--only is {name}; allowed: {', '.join(CASES)}")
    return [case for name, case in CASES.items() if only is None or name in only]


def settings_of(options: argparse.Namespace) -> Settings:
    """The device, the dtype and the sizes, which all cases share.

    Raises:
        ValueError: this machine has no such device.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no such device; allowed here: cpu")
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return Settings(options.device, DTYPES[dtype], options.quick)


def run(cases: list[Case], settings: Settings, earlier: Results, keep: Callable[[Results], None]) -> Results:
    """Measure ``cases`` size by size and call ``keep`` with the results so far after each; Ctrl-C ends it early.

    The results begin with those of ``earlier``; cases and sizes that are complete there are not measured again.
    """
    started, records, complete = time.monotonic(), list(earlier.records), list(earlier.complete)
    work = []
    for case in cases:
        if settings.device in case.devices:
            work += [(case, size) for size in case.sizes_of(settings) if (case.name, size) not in complete]
        elif case.name not in {record.case for record in records}:
            records.append(Record(case.name, 0, "", "all", NOT_RUN, _wrong_device(case)))

    def so_far() -> Results:
        minutes = earlier.machine.minutes + (time.monotonic() - started) / 60
        return Results(earlier.machine._replace(minutes=round(minutes, 1)), records, tuple(complete))

    with tqdm(work, unit=" sizes", disable=None) as bar:
        try:
            for case, size in bar:
                bar.set_description(f"{case.name}, {size:,} {case.axis}")
                records += measure(case, size, settings)
                complete.append((case.name, size))
                keep(so_far())
        except KeyboardInterrupt:
            reason = "interrupted; the rest was not measured: the same command with --resume goes on"
            return so_far()._replace(records=[*records, Record(_INTERRUPTED, 0, "", "all", FAILED, reason)])
    return so_far()


def interrupted_run(path: Path, here: Machine) -> Results:
    """Load the results of an interrupted run from ``path``; ``here`` has to have the same versions and settings.

    Raises:
        ValueError: there are no results, or the machine, a version, the commit or a setting differs.
    """
    if not path.is_file():
        raise ValueError(
            f"--resume is given; allowed with a --out that holds results, unlike {shown_path(path.parent)}"
        )
    results = load(path)
    for name, value in here._asdict().items():
        before = getattr(results.machine, name)
        if name not in _OF_A_RUN and before != value:
            raise ValueError(f"--resume is given, and {name} is {value}; allowed with {shown_path(path)}: {before}")
    return results._replace(records=[record for record in results.records if record.case != _INTERRUPTED])


def _wrong_device(case: Case) -> str:
    needed = " or ".join(case.devices)
    available = "cuda" not in case.devices or torch.cuda.is_available()
    return f"needs --device {needed}" if available else "no CUDA device"


def write(out: Path, results: Results) -> str:
    """Write results.txt, .md and .json and the pictures into ``out``; returns the text."""
    verdicts, foot = targets.verdicts(results), report.run_of(results)
    plain = as_text(report.tables(results, CASES, verdicts), foot)
    write_text(out / "results.txt", plain + "\n")
    save(results, out / "results.json")
    pictures = [f"![{CASES[path.stem].title}]({path.name})" for path in picture.draw(results, CASES, out)]
    if summary.draw(results, out / summary.NAME):
        pictures.insert(0, f"![Time per token by length]({summary.NAME})")
    parts = [_HEAD, page.text(results, CASES, verdicts), as_markdown([], foot), "\n".join(pictures)]
    write_text(out / "results.md", "\n\n".join(filter(None, parts)) + "\n")
    return plain


@script("bench")
def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a candidate differed from its reference or failed, else 0."""
    options = parser().parse_args(arguments)
    command = command_line(COMMAND, arguments)
    cases, settings = chosen(options.only), settings_of(options)
    if options.list:
        for case in cases:
            sizes = ", ".join(f"{size:,}" for size in case.sizes)
            print(f"{case.name:<22} {case.title} ({'/'.join(case.devices)}; {case.axis}: {sizes})")
        return 0
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    out = options.out.absolute()
    with working_folder(out, COMMAND):
        return _measure(cases, settings, out, command, options.resume)


def _measure(cases: list[Case], settings: Settings, out: Path, command: str, resume: bool) -> int:
    path, current = out / "results.json", machine.describe(command, settings)
    earlier = interrupted_run(path, current) if resume else Results(current, [])
    # Saved after every size, so that an interruption loses nothing.
    results = run(cases, settings, earlier, lambda so_far: save(so_far, path))
    print("\n" + write(out, results))
    pictures = ", and pictures" if any(case.plotted for case in cases) else ""
    print(f"\nThe same as Markdown and JSON{pictures}: {shown_path(out)}")
    for fault in results.faults():
        print(f"bench: {fault.case}, {fault.form}: {fault.reason}", file=sys.stderr)
    return 1 if results.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
