"""Perplexity by position up to several times the training length, of every causal architecture, in one picture.

``python -m recipes.long_contexts.lengths --file FILE`` from the checkout's root trains them with one budget, through
fairseq-train; ``--runs FOLDER`` takes what ``recipes.wikitext103.compare`` trained. Run again, it goes on where it was
interrupted.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, get_type_hints

import torch
from tqdm import tqdm

from ..shared.comparison import MODEL, SEEDS, Results, train_and_read
from ..shared.experiment import PARAMETERS, Data, Experiment, Record, option
from ..shared.json_files import read_json, write_json
from ..shared.language_models import (
    FILE_HELP,
    LIMIT_HELP,
    WHOLE,
    GateVariants,
    model_names,
    models_option,
    names_with_gates,
    prepare,
)
from ..shared.scripts import positive_int
from ..shared.trainings import TrainingResult, read_parameters, read_trained
from ..shared.variants import NO_POSITIONS
from . import positions
from .lengths_report import best_first, change_column, draw, length_columns, notes, refusals
from .positions import Bin

COMMAND = "recipes.long_contexts.lengths"
#: FLASH's gated attention units, which are no mechanism of Transformer layers.
FLASH = "flash"
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
class LengthModels(GateVariants):
    """The options of language models that are built for ``times`` the length of the sequences they are trained on."""

    #: With the perplexity of the valid text, by which a checkpoint is chosen; this text is read often enough later.
    most_evaluations: ClassVar[int] = 2

    file: Path | None = option(None, FILE_HELP, setting=False, type=Path)
    # With --quick too the test text is longer than a few windows.
    limit: int | None = option(None, LIMIT_HELP, quick=8_000, setting=False, type=positive_int, metavar="LINES")
    models: Sequence[str] = models_option(names, default_names())
    seeds: int = option(1, "runs of each model (%(default)s)", setting=False)
    updates: int = option(300, "of every training (%(default)s)", quick=4)
    times: int = option(8, "windows, in training lengths (%(default)s)")
    windows: int = option(200, "of the test text, at most (%(default)s)")
    runs: Path | None = option(
        None,
        "trained models, the --out of recipes.wikitext103.compare or gates, in place of --file",
        setting=False,
        type=Path,
        metavar="FOLDER",
    )

    def completed(self) -> "LengthModels":
        """The options; with ``--runs`` the budget is that of the trainings there.

        Raises:
            ValueError: not one of ``--file`` and ``--runs``, windows of one length, sequences longer than a batch, or a
                folder without trainings.
        """
        if (self.file is None) == (self.runs is None):
            raise ValueError("--file and --runs are both given, or neither; allowed: one of them")
        if self.times < 2:
            raise ValueError(f"--times is {self.times}; allowed: at least 2, beyond the training length")
        if self.runs is None:
            return super().completed()
        runs = self.runs.absolute()
        missing = [name for name in _OF_RUNS if not (runs / name).exists()]
        if missing:
            raise ValueError(
                f"--runs is {self.runs}, without {', '.join(missing)}; allowed: the --out of "
                "recipes.wikitext103.compare"
            )
        trained = trained_in(runs)
        if not trained:
            raise ValueError(f"--runs is {self.runs}, in which no training is complete; allowed: one where some are")
        stored = read_json(runs / "settings.json", tokens_per_sample=int)
        kinds = {name: kind for name, kind in get_type_hints(LengthModels).items() if name in stored}
        stored = read_json(runs / "settings.json", **kinds)
        own = {field.name for field in fields(self)} - {"times", "windows", "runs"}
        budget = {name: stored[name] for name in kinds if name in own}
        models = list(dict.fromkeys(name for name, _ in trained))
        return replace(self, runs=runs, models=models, seeds=len({seed for _, seed in trained}), **budget)

    def settings(self) -> Record:
        """See ``Options``; with ``--runs`` those of the windows."""
        if self.runs is None:
            return super().settings()
        return {"runs": str(self.runs), "times": self.times, "windows": self.windows}

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


def trained_in(runs: Path) -> dict[tuple[str, int], tuple[Path, TrainingResult]]:
    """The complete trainings in the folder of a comparison: folder and result, by model and seed."""
    made = {}
    for folder in sorted((runs / "runs").iterdir()):
        if (trained := read_trained(folder)) is not None:
            name, seed = folder.name.rsplit(".", 1)
            made[name, int(seed)] = folder, trained
    return made


class Lengths:
    """Measures trained models on windows of the text, and keeps what it measured in the folder of the experiment."""

    def __init__(self, options: LengthModels, data: Path) -> None:
        self.data, self.length, self.longest = data, options.tokens_per_sample, options.longest
        self.out = options.out / "positions"
        self.windows = positions.windows(positions.read_stream(data), self.length, self.longest, options.windows)

    def measure(self, folder: Path) -> None:
        """Measure the model that was trained in ``folder``, unless it has been done."""
        path = self._path(folder)
        if path.exists():
            return
        content: Record = {"bins": [], "refused": None}
        try:
            model = positions.load_model(folder / "checkpoints" / "checkpoint_best.pt", self.data, self.longest)
            losses = positions.losses(model, self.windows, folder.name)
            content["bins"] = [part._asdict() for part in positions.binned(losses, self.length)]
        except ValueError as error:
            content["refused"] = str(error).splitlines()[0]
        write_json(path, content)

    def read(self, name: str, seed: int, folder: Path, trained: TrainingResult) -> Record | None:
        """The record of the model that was trained in ``folder``; None if it was not measured.

        ``bins`` are those of ``positions.binned``, none where the model cannot read so many tokens; ``refused`` is why.
        """
        path = self._path(folder)
        if not path.exists():
            return None
        content = read_json(path, bins=list[Bin], refused=str | None)
        return {
            "model": name,
            "seed": seed,
            "parameters": read_parameters(folder),
            "bins": [part._asdict() for part in content["bins"]],
            "refused": content["refused"],
            "seconds": trained.seconds,
        }

    def _path(self, folder: Path) -> Path:
        return self.out / f"{folder.name}.json"


def text_of(options: LengthModels) -> Data:
    """The text in tokens, made unless it is there; the facts have ``longest`` windows and how many there are, too."""
    if options.runs is None:
        folder, facts = prepare(options)
    else:
        text = read_json(options.runs / "text.json", characters=bool)
        unit = "characters" if text["characters"] else "subwords" if "subwords" in text else "words"
        folder, facts = options.runs / "data-bin", {"tokens": read_json(options.runs / "tokens.json"), "unit": unit}
    return Data(folder, {**facts, "windows": len(Lengths(options, folder).windows)})


def train(options: LengthModels, data: Data) -> Results:
    """Train what is not yet trained, or take what ``--runs`` has, and measure it."""
    torch.set_num_threads(1)
    lengths = Lengths(options, data.folder)
    if options.runs is None:
        planned = EXPERIMENT.planned(options, data)
        return train_and_read(planned, options.out / "runs", options.jobs, lengths.read, lengths.measure)
    records = []
    for (name, seed), (folder, trained) in tqdm(trained_in(options.runs).items(), unit=" models", disable=None):
        lengths.measure(folder)
        records.append(lengths.read(name, seed, folder, trained))
    return Results(records, {})


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=LengthModels,
    title=lambda options, facts: (
        f"Perplexity by position, models trained on sequences of {options.tokens_per_sample:,}"
    ),
    columns=lambda options, facts: [MODEL, PARAMETERS, *length_columns(options), change_column(options), SEEDS],
    order=best_first,
    notes=notes,
    prepare=text_of,
    train=train,
    measure=refusals,
    picture=draw,
    whole=WHOLE,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
