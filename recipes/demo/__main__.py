"""``python -m recipes.demo``: train, evaluate and write text with fairseq, train on images with timm, show both."""

import argparse
import sys
import time
from pathlib import Path

from common.command_parser import CommandParser

from ..shared.commands import ROOT, python_command, run, shown_path
from ..shared.scripts import command_line, script
from ..shared.tables import describe_run
from ..shared.working_folder import working_folder
from . import picture, results
from .images import MODEL, REQUIRED_TOP1, check_scripts, run_images
from .text import ARCHITECTURES, COMMAND, FULL, QUICK, Budget, run_text

#: The folders that each run replaces.
WHOLE = dict.fromkeys(("bin", *ARCHITECTURES, "images/digits", f"images/{MODEL}"), COMMAND)
#: The default folder of recipes/imagenet/scripts.sh. The demo downloads nothing.
FETCHED_SCRIPTS = ROOT / "work" / "timm-scripts"


def parser() -> CommandParser:
    """The demo's options."""
    parser = CommandParser(prog="python -m recipes.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("work/demo"), help="folder for everything (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    parser.add_argument(
        "--timm-scripts",
        type=Path,
        metavar="DIR",
        help="train the digits with the train.py of timm that lies in DIR (default: work/timm-scripts, where"
        " recipes/imagenet/scripts.sh puts it, if it is there; else a loop of timm's parts)",
    )
    return parser


@script("demo")
def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parser().parse_args(arguments)
    budget = QUICK if options.quick else FULL
    out = options.out.absolute()
    scripts = options.timm_scripts
    if scripts is None and (FETCHED_SCRIPTS / "train.py").is_file():
        scripts = FETCHED_SCRIPTS
    command = command_line(COMMAND, arguments)
    check_scripts(scripts)  # fail before minutes are spent
    with working_folder(out, COMMAND, whole=WHOLE):
        return _run(options, budget, out, scripts and scripts.absolute(), command)


def _run(options: argparse.Namespace, budget: Budget, out: Path, scripts: Path | None, command: str) -> int:
    started = time.monotonic()
    text = run_text(out, budget)
    print(f"Speed of a training step at {', '.join(f'{n:,}' for n in budget.lengths)} tokens", flush=True)
    log = out / "logs" / "lengths.log"
    run(python_command("-m", "recipes.demo.lengths", out / "bin", "--lengths", *budget.lengths), log)
    images = run_images(out, budget, scripts)
    speeds = results.read_speeds(log.read_text(encoding="utf-8").splitlines())
    run_description = describe_run(command, time.monotonic() - started)
    print("\n" + results.write(out, text, speeds, images, run_description))
    picture.draw(text, images, out / "demo.png")
    print(f"\nPicture: {shown_path(out / 'demo.png')}   everything else: {shown_path(out)}")
    if not options.quick and images.top1 < REQUIRED_TOP1:
        print(f"The digits were learned to {images.top1:.1f} %; {REQUIRED_TOP1:.0f} % are required.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
