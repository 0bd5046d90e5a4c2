"""Processor time of torch.compile for language models: ``python -m recipes.bench.compile_time --help``."""

import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

from common.attention import ATTENTIONS
from common.command_parser import CommandParser

from ...shared.architectures import architectures_of, known_names
from ...shared.commands import python_command, run, shown_path
from ...shared.json_files import read_record, write_json
from ...shared.scripts import RecipeFailed, command_line, script
from ...shared.tables import MISSING, Table, describe_run, write_reports
from ...shared.working_folder import working_folder
from . import one
from .one import Cost

MODULE = "recipes.bench.compile_time"
#: The baseline.
STOCK = "transformer"
#: The largest difference from the model without torch.compile, in float32.
ALLOWED = 1e-3


def all_models() -> list[str]:
    """Stock, FLASH, and every mechanism that supports causal, without the ``_lm`` of their names."""
    causal = {name for name, attention in ATTENTIONS.items() if "causal" in attention.supports}
    return [STOCK, *(name for name in known_names("_lm") if name in causal or name == "flash")]


def parser() -> CommandParser:
    """The options."""
    parser = CommandParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        type=architectures_of("_lm"),
        help=f"comma-separated; {STOCK} is measured as well (default: it, flash, and every causal mechanism)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("work/compile_time"), help="models found there are kept (%(default)s)"
    )
    return parser


def measured(model: str, out: Path) -> Cost:
    """Read the cost of ``model`` from ``out``, or measure it in a separate process, which takes minutes.

    Raises:
        RecipeFailed: the process failed, or compiled and uncompiled outputs or gradients differ.
    """
    path = out / f"{model}.json"
    if not path.exists():
        lines: list[str] = []
        run(python_command("-m", one.MODULE, f"{model}_lm"), out / f"{model}.log", lines.append, threads=1)
        write_json(path, json.loads(lines[-1]))
    cost = read_record(path, Cost)
    if not cost.difference <= ALLOWED:
        raise RecipeFailed(f"{model}_lm differs by {cost.difference:.1e} under torch.compile; allowed: {ALLOWED:.0e}")
    return cost


def table(costs: dict[str, Cost]) -> Table:
    """One row for each model, the fastest to compile first."""
    stock = _total(costs[STOCK]) if STOCK in costs else None
    rows = []
    for name, cost in sorted(costs.items(), key=lambda item: _total(item[1])):
        ratio = MISSING if stock is None else f"{_total(cost) / stock:.2f}"
        cells = f"{_total(cost):.0f}", ratio, f"{cost.python:.0f}", f"{cost.compiler:.0f}"
        rows.append((f"{name}_lm", *cells, *(f"{x:,}" for x in (cost.graphs, cost.operations, cost.kernels))))
    lengths = ", ".join(map(str, one.LENGTHS))
    notes = [
        f"{one.LAYERS} layers of width {one.WIDTH} (flash_lm: as many gated attention units), {one.ROWS} sequences of "
        f"{lengths} tokens one after the other, the backward pass of the last",
        "seconds of processor time, one thread, an empty cache; Python's and the C++ compiler's part of it",
        "graphs that inductor was given, their operations, views included, and different C++ kernels",
    ]
    return Table(
        "Compiling", ["model", "seconds", "over stock", "Python", "C++", "graphs", "operations", "kernels"], rows, notes
    )


def _total(cost: Cost) -> float:
    return cost.python + cost.compiler


@script("compile_time")
def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the table; 0.

    Raises:
        RecipeFailed: ``measured`` failed for some models; raised after all others are measured.
    """
    options = parser().parse_args(arguments)
    names = all_models() if options.models is None else list(dict.fromkeys([STOCK, *options.models]))
    out, started, costs, failed = options.out.absolute(), time.monotonic(), {}, []
    command = command_line(MODULE, arguments)
    with working_folder(out, MODULE):
        for model in tqdm(names, unit=" models", disable=None):
            try:
                costs[model] = measured(model, out)
            except RecipeFailed as error:  # continue with the other models
                failed.append(str(error))
                continue
            content = {name: cost._asdict() for name, cost in costs.items()}
            text = write_reports(out, [table(costs)], describe_run(command, time.monotonic() - started), content)
        if costs:
            print(f"\n{text}\n\nThe same as Markdown and JSON: {shown_path(out)}")
    if failed:
        raise RecipeFailed("\n".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
