"""Perplexity by position up to several times the training length, of every causal architecture, in one picture.

``python -m recipes.long_contexts.lengths --file FILE`` from the checkout's root trains them with one budget, through
fairseq-train; ``--runs FOLDER`` takes what ``recipes.wikitext103.compare`` trained. Run again, it goes on where it was
interrupted.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import torch
from tqdm import tqdm

from common.command_parser import CommandParser

from ..shared.additions import NO_POSITIONS
from ..shared.comparison import Compared, show, train_and_read
from ..shared.json_files import read_json, write_json
from ..shared.language_models import FILE_HELP, WRITER, model_names, names_with_gates
from ..shared.scripts import command_line, positive_int, script
from ..shared.settings import keep_settings
from ..shared.trainings import Trained, read_parameters, read_trained
from ..shared.unported import GatePlan, prepare_chosen
from ..shared.unported import parser as parser_of_trainings
from ..shared.working_folder import working_folder
from . import positions
from .lengths_report import Measured, report
from .positions import Bin

COMMAND = "recipes.long_contexts.lengths"
#: FLASH's gated attention units, which are no mechanism of Transformer layers.
FLASH = "flash"
UPDATES, QUICK_UPDATES = 300, 4
#: With the perplexity of the valid text, by which a checkpoint is chosen; this text is read often enough later.
_EVALUATIONS = 2
#: Positions are sinusoids that no model has seen beyond its training length; these do without.
_WITHOUT_POSITIONS = ("softmax", "local", "linear+forget", "flow+forget", "retention", "gla", "gated_delta", FLASH)
#: Whose output is what this command trains or reads; a comparison's folder has all of these.
_OF_RUNS = ("settings.json", "tokens.json", "text.json", "data-bin", "runs")


def names() -> list[str]:
    """The models of ``recipes.wikitext103.gates``, and FLASH."""
    return [*names_with_gates(), FLASH, FLASH + NO_POSITIONS]


def default_names() -> list[str]:
    """Every causal mechanism, FLASH, additions of ours, and some models without positions."""
    plain = [name for name in model_names() if "+" not in name]
    added = ["linear+forget", "flow+forget", "flow+short_conv"]
    return [*plain, FLASH, *added, *(name + NO_POSITIONS for name in _WITHOUT_POSITIONS)]


@dataclass(frozen=True, kw_only=True)
class LengthPlan(GatePlan):
    """The budget of language models that are built for ``times`` the length of the sequences they are trained on."""

    times: int

    @property
    def longest(self) -> int:
        """Tokens of the windows in which the loss is measured."""
        return self.times * self.tokens_per_sample

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that say how a model is built: two units of FLASH are one layer, with as many parameters."""
        arguments = [*super().model_arguments(name), "--max-target-positions", self.longest]
        if name.removesuffix(NO_POSITIONS) == FLASH:
            arguments += ["--decoder-layers", 2 * self.layers, "--decoder-ffn-embed-dim", 2 * self.width]
        return arguments

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of a model; chunks of FLASH are a quarter of a sequence as the others' are."""
        if name == FLASH:
            return ["--arch", "flash_lm", "--flash-chunk-size", max(1, self.tokens_per_sample // 4)]
        return super().attention_arguments(name)


class Lengths:
    """Measures trained models on windows of the text in ``data``, and keeps what it found in the folder ``out``."""

    def __init__(self, data: Path, length: int, longest: int, most: int, out: Path) -> None:
        self.data, self.length, self.longest, self.out = data, length, longest, out
        self.windows = positions.windows(positions.read_stream(data), length, longest, most)

    def measure(self, folder: Path) -> None:
        """Measure the model that was trained in ``folder``, unless it has been done."""
        kept = self._kept(folder)
        if kept.exists():
            return
        found: dict[str, object] = {"bins": [], "refused": None}
        try:
            model = positions.load_model(folder / "checkpoints" / "checkpoint_best.pt", self.data, self.longest)
            found["bins"] = positions.binned(positions.losses(model, self.windows, folder.name), self.length)
        except ValueError as error:
            found["refused"] = str(error).splitlines()[0]
        write_json(kept, found)

    def read(self, name: str, seed: int, folder: Path, trained: Trained) -> Measured | None:
        """The stored measurement of the model that was trained in ``folder``; None if there is none."""
        kept = self._kept(folder)
        if not kept.exists():
            return None
        found = read_json(kept, bins=list[Bin], refused=str | None)
        return Measured(name, seed, read_parameters(folder), found["bins"], found["refused"], trained.seconds)

    def _kept(self, folder: Path) -> Path:
        return self.out / "positions" / f"{folder.name}.json"


def parser() -> CommandParser:
    """The script's options."""
    description = __doc__.splitlines()[0]
    known = parser_of_trainings(COMMAND, description, names(), default_names(), takes_file=False, updates=UPDATES)
    known.set_defaults(out=Path("work/long_contexts/lengths"), seeds=1, updates=UPDATES)
    known.add_argument("--file", type=Path, help=FILE_HELP)
    known.add_argument("--times", type=positive_int, default=8, help="windows, in training lengths (%(default)s)")
    known.add_argument("--windows", type=positive_int, default=200, help="of the test text, at most (%(default)s)")
    known.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="trained models, the --out of recipes.wikitext103.compare or gates, in place of --file",
    )
    return known


@script("lengths")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    if (options.file is None) == (options.runs is None):
        raise ValueError("--file and --runs are both given, or neither; allowed: one of them")
    if options.times < 2:
        raise ValueError(f"--times is {options.times}; allowed: at least 2, beyond the training length")
    torch.set_num_threads(1)
    out, command = options.out.absolute(), command_line(COMMAND, arguments)
    if options.quick and options.updates == UPDATES:
        options.updates = QUICK_UPDATES
    run = _train if options.runs is None else _take
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        return run(options, out, command)


def _train(options: argparse.Namespace, out: Path, command: str) -> int:
    started = time.monotonic()
    plan = LengthPlan.chosen(options, evaluations=min(_EVALUATIONS, options.updates), more=shlex.split(options.more))
    keep_settings(out / "settings.json", {**plan.settings(), "windows": options.windows})
    tokens, unit = prepare_chosen(options, out)
    lengths = Lengths(out / "data-bin", plan.tokens_per_sample, plan.longest, options.windows, out)
    planned = plan.trainings(out / "data-bin")
    compared = train_and_read(planned, out / "runs", options.jobs, lengths.read, lengths.measure)
    show(out, report(plan, tokens, unit, lengths.windows, compared), command, started)
    return compared.status


def _take(options: argparse.Namespace, out: Path, command: str) -> int:
    """Measure what another comparison trained."""
    started, runs = time.monotonic(), options.runs.absolute()
    missing = [name for name in _OF_RUNS if not (runs / name).exists()]
    if missing:
        raise ValueError(
            f"--runs is {options.runs}, without {', '.join(missing)}; allowed: the --out of recipes.wikitext103.compare"
        )
    trained = {folder: one for folder in sorted((runs / "runs").iterdir()) if (one := read_trained(folder)) is not None}
    named = [(*folder.name.rsplit(".", 1), folder) for folder in trained]
    if not named:
        raise ValueError(f"--runs is {options.runs}, in which no training is complete; allowed: one where some are")
    settings = read_json(runs / "settings.json", tokens_per_sample=int)
    kinds = {name: kind for name, kind in get_type_hints(LengthPlan).items() if name in settings}
    settings = read_json(runs / "settings.json", **kinds)
    seeds = len({seed for _, seed, _ in named})
    given = {"models": list(dict.fromkeys(name for name, *_ in named)), "seeds": seeds, "times": options.times}
    plan = LengthPlan(**{**{name: settings[name] for name in kinds}, **given})
    keep_settings(out / "settings.json", {"runs": str(runs), "times": options.times, "windows": options.windows})
    lengths = Lengths(runs / "data-bin", plan.tokens_per_sample, plan.longest, options.windows, out)
    found = []
    for name, seed, folder in tqdm(named, unit=" models", disable=None):
        lengths.measure(folder)
        found.append(lengths.read(name, int(seed), folder, trained[folder]))
    text = read_json(runs / "text.json", characters=bool)
    unit = "characters" if text["characters"] else "subwords" if "subwords" in text else "words"
    show(
        out, report(plan, read_json(runs / "tokens.json"), unit, lengths.windows, Compared(found, {})), command, started
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
