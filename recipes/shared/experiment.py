"""An experiment as data: the trainings of a command with one budget, their results, tables and a picture.

An area has one file for each command, ``recipes/AREA/NAME.py``, run by ``python -m recipes.AREA.NAME``. It defines

1. the options, a subclass of ``Options`` (or of ``Budget``: fairseq-train with the same optimiser and number of updates
   for all models; or of ``language_models.LanguageModels``). Each field made by ``option`` is an option of the command:
   its default, its help, its value with ``--quick``, and whether all trainings in a folder share it (``setting``). To
   change a field of a base class, define it again; without ``option`` it is no longer an option. ``completed`` fills in
   values that depend on other options, and raises ValueError for contradictions;
2. functions: ``prepare`` makes the data and returns facts about it; ``arguments`` returns those of fairseq-train for a
   model and a seed, unless the options have a method ``train_arguments``; ``read`` returns the values that a complete
   training adds to its record;
3. ``EXPERIMENT``, an ``Experiment`` with these, the columns of the table (``Column`` with ``mean``, ``median`` or
   ``largest`` of a name of the records), the notes below it, and a picture (``Picture``, or a function that draws);
4. ``main = EXPERIMENT.main``, and ``sys.exit(main())`` where the file is run.

A record is a flat dictionary of JSON values: ``model``, ``seed``, ``parameters``, ``seconds``, ``peak_bytes`` and
``command`` of one training, and the values of ``read``. Facts are a dictionary as well: values that do not belong to
one training, such as the number of tokens. Tables and pictures depend only on options, facts and records, so that they
can be made again from stored records. An area whose trainings depend on each other, or do not use fairseq-train, has
its own function ``train`` instead of ``arguments``, ``read`` and ``evaluate``; one whose trainings are not every model
with every seed has ``plan`` instead of ``arguments``.

To add an experiment: write that file, and enter it in ``tests/recipes/test_every_experiment.py``, which tests its help,
options, arguments, tables, picture and records. ``recipes.results`` shows stored records in a README.
"""

import argparse
import dataclasses
import functools
import itertools
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from matplotlib import pyplot as plt

from common.command_parser import CommandParser

from .comparison import (
    NO_READER,
    Column,
    PlannedTraining,
    Report,
    Results,
    by_model,
    planned_trainings,
    show,
    table,
    train_and_read,
)
from .plots import STYLE, Series, curves_and_dots, label_upwards, save
from .scripts import command_line, positive_int, positive_number, script
from .settings import check_settings, keep_settings
from .tables import Table, spread
from .trainings import TrainingResult, read_parameters
from .working_folder import working_folder

#: The record of one complete training: name -> JSON value.
Record = dict[str, Any]
Chosen = TypeVar("Chosen", bound="Options")
#: Type of a default -> the type of its option.
_TYPES = {int: positive_int, float: positive_number}


def option(
    default: Any = None,
    help: str = "default: %(default)s",
    *,
    quick: Any = None,
    setting: bool = True,
    names: Sequence[str] = (),
    group: str | None = None,
    **argument: Any,
) -> Any:
    """A field of ``Options`` that is an option of the command.

    Args:
        default: the value without the option; a number requires positive values, False makes a flag.
        quick: the default with ``--quick``, if it differs.
        setting: whether all trainings in a folder share it.
        names: as typed, if not ``--`` and the field's name; without a dash it is a positional argument.
        group: options of one group exclude each other.
        argument: further arguments of ``add_argument``.
    """
    if default is False:
        argument["action"] = "store_true"
    elif type(default) in _TYPES:
        argument.setdefault("type", _TYPES[type(default)])
    described = {"quick": quick, "setting": setting, "names": names, "group": group, "argument": argument}
    return field(default=default, metadata={**described, "help": help})


def shell_words(text: str) -> list[str]:
    """The type of an option whose value is words as a shell reads them; argparse.ArgumentTypeError for open quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}; allowed: words as a shell reads them") from error


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of an experiment, each a field; see ``option``."""

    out: Path = option(Path(), setting=False, type=Path)  # by default work/AREA/NAME
    models: Sequence[str] = option((), setting=False, nargs="+", metavar="NAME")
    seeds: int = option(3, "runs of each model (%(default)s)", setting=False)
    jobs: int = option(1, "trainings at a time, a thread each (%(default)s)", setting=False)
    quick: bool = option(False, "only see that everything runs: nothing is learned", setting=False)

    def completed(self: Chosen) -> Chosen:
        """The options with the values that depend on other options filled in.

        Raises:
            ValueError: options that contradict each other.
            argparse.ArgumentTypeError: such options, reported as argparse does, with status 2.
        """
        return self

    def settings(self) -> Record:
        """Settings that all trainings in a folder share: all but models and seeds, which may be added later."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.metadata.get("setting")}

    def as_dict(self) -> Record:
        """The settings with models and seeds, as stored with the results."""
        return {"models": list(self.models), "seeds": self.seeds, **self.settings()}


@dataclass(frozen=True, kw_only=True)
class Budget(Options):
    """The options of trainings by fairseq-train with one optimiser, size and number of updates."""

    #: Evaluations during a training with at least as many updates.
    most_evaluations: ClassVar[int] = 8

    updates: int = option(1_000, "of every training (%(default)s)", quick=8)
    lr: float = option(3e-3, "highest learning rate, of all models (%(default)s)")
    width: int = option(64)
    layers: int = option(2)
    heads: int = option(4)

    @property
    def evaluations(self) -> int:
        """Evaluations during each training."""
        return min(self.most_evaluations, self.updates)

    def settings(self) -> Record:
        """See ``Options``."""
        return {**super().settings(), "evaluations": self.evaluations}

    def update_arguments(self, seed: int) -> list[object]:
        """Arguments of fairseq-train: the optimiser, the budget, and checkpoints after each evaluation."""
        interval = max(1, self.updates // self.evaluations)
        return [
            *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0", "--lr", self.lr),
            *("--max-update", self.updates, "--seed", seed, "--required-batch-size-multiple", 1),
            *("--save-interval-updates", interval, "--keep-interval-updates", 1, "--no-epoch-checkpoints"),
            *("--save-interval", 1_000_000, "--validate-interval", 1_000_000),
            *("--log-interval", max(1, interval // 4), *NO_READER),
        ]


class Data(NamedTuple):
    """The data of an experiment: the folder that fairseq-train gets, and facts about the data."""

    folder: Path
    facts: Record


def train_arguments(options: Any, data: Data, model: str, seed: int) -> list[object]:
    """The ``arguments`` of an experiment whose options have a method ``train_arguments``."""
    return options.train_arguments(data.folder, model, seed)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A curve by update, averaged over seeds, and a dot for each model; values are given by their names in a record."""

    curve: str  # pairs of an update and a value
    across: str
    up: str
    filled: Callable[[str], bool]  # whether the dot of a model is filled
    curves: Mapping[str, Any]  # arguments of matplotlib's Axes.set, for the curves
    dots: Mapping[str, Any]  # and for the dots

    def __call__(self, options: Options, facts: Record, records: Sequence[Record], path: Path) -> None:
        """Draw ``records`` to a file."""
        models = [
            Series(
                name,
                [record[self.curve] for record in records_of_model],
                statistics.median(record[self.across] for record in records_of_model),
                [record[self.up] for record in records_of_model],
                self.filled(name),
            )
            for name, records_of_model in by_model(records, options.models).items()
        ]
        with plt.rc_context(STYLE):
            figure, curves, dots = curves_and_dots(models)
            curves.set(xlabel="update", **self.curves)
            if curves.get_yscale() == "log":
                label_upwards(curves)
            dots.set(**self.dots)
            save(figure, path, dpi=130)


def mean(name: str, digits: int = 2) -> Callable[[Sequence[Record]], str]:
    """A cell: mean and deviation over seeds of ``name`` in the records."""
    return lambda records: spread([record[name] for record in records], digits)


def median(name: str, scale: float = 1.0) -> Callable[[Sequence[Record]], str]:
    """A cell: the median over seeds of ``name`` in the records."""
    return lambda records: f"{scale * statistics.median(record[name] for record in records):,.0f}"


def largest(name: str, scale: float = 1.0) -> Callable[[Sequence[Record]], str]:
    """A cell: the maximum over seeds of ``name`` in the records."""
    return lambda records: f"{scale * max(record[name] for record in records):,.0f}"


#: Columns of more than one experiment.
PARAMETERS = Column("parameters", lambda records: f"{records[0]['parameters']:,}")
MILLIONS = Column("parameters", lambda records: f"{records[0]['parameters'] / 1e6:.2f} M")
PEAK = Column("MiB", largest("peak_bytes", 2**-20))
MINUTES = Column(
    "minutes each", lambda records: f"{statistics.median(record['seconds'] for record in records) / 60:.1f}"
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A command that trains several models with one budget, and its tables and picture."""

    command: str  # the module
    about: str  # a line for --help
    options: type[Options]
    title: str | Callable[[Any, Record], str]  # of the table; a function gets options and facts
    columns: Sequence[Column] | Callable[[Any, Record], Sequence[Column]]
    notes: Callable[[Any, Record], list[str]]  # below the table
    #: Sorts models by records into the order of the table's rows; None: the order of the command line.
    order: Callable[[Sequence[str], Sequence[Record]], Sequence[str]] | None = None
    #: Makes the data unless it exists.
    prepare: Callable[[Any], Data]
    #: Options, data, model and seed -> arguments of fairseq-train, without the folder of checkpoints.
    arguments: Callable[[Any, Data, str, int], list[object]] = train_arguments
    #: Records of earlier runs, which are shown; their trainings are not run again.
    earlier: Callable[[Any, Data], list[Record]] | None = None
    #: Instead of ``arguments``: the trainings, if they are not every model with every seed.
    plan: Callable[[Any, Data], list[PlannedTraining]] | None = None
    #: Values that a complete training in a folder adds to its record; None if it has not been evaluated.
    read: Callable[[Any, Path, Record], Record | None] | None = None
    #: Runs a command on a complete training in a folder, unless that is done already.
    evaluate: Callable[[Any, Data, Path], None] | None = None
    #: Instead of ``arguments``, ``read`` and ``evaluate``: makes the records, which are the outcomes.
    train: Callable[[Any, Data], Results] | None = None
    #: Further facts, measured after all trainings.
    measure: Callable[[Any, Data, Results], Record] | None = None
    extra_tables: Callable[[Any, Record, list[Record]], list[Table]] | None = None
    #: Draws a picture of options, facts and records to a file.
    picture: Callable[[Any, Record, Sequence[Record], Path], None] | None = None
    picture_name: str = "results.png"
    whole: Mapping[str, str] = field(default_factory=dict)  # folders that are replaced, and who writes them
    runs: str = "runs"  # the folder of the trainings, in --out
    one_budget: bool = True  # whether all trainings in a folder must have the same settings
    lacking: str = "not trained"  # the note on a training without a record

    def parser(self) -> CommandParser:
        """The parser of the command line."""
        parser = CommandParser(prog=f"python -m {self.command}", description=self.about)
        groups: dict[str, Any] = {}
        for entry in fields(self.options):
            if not entry.metadata:
                continue
            names = entry.metadata["names"] or (f"--{entry.name.replace('_', '-')}",)
            argument = {"help": entry.metadata["help"], **entry.metadata["argument"]}
            if names[0].startswith("-"):
                default = list(entry.default) if isinstance(entry.default, tuple) else entry.default
                argument |= {"dest": entry.name, "default": default}
            if entry.name == "out" and entry.default == Path():
                argument["default"] = Path("work", *self.command.split(".")[1:])
            group = entry.metadata["group"]
            if group is not None and group not in groups:
                groups[group] = parser.add_mutually_exclusive_group()
            groups.get(group, parser).add_argument(*names, **argument)
        return parser

    def parse(self, arguments: Iterable[str] | None) -> Any:
        """The completed options of a command line.

        Raises:
            ValueError: options that contradict each other.
        """
        parser = self.parser()
        described = {entry.name: entry.metadata for entry in fields(self.options) if entry.metadata}
        arguments = None if arguments is None else list(arguments)
        if getattr(parser.parse_args(arguments), "quick", False):
            quick = {name: metadata["quick"] for name, metadata in described.items()}
            parser.set_defaults(**{name: value for name, value in quick.items() if value is not None})
        values = vars(parser.parse_args(arguments))
        if "models" in values:
            lists = ([item] if isinstance(item, str) else item for item in values["models"] or ())
            values["models"] = list(dict.fromkeys(itertools.chain.from_iterable(lists)))
        try:
            options = self.options(**values).completed()
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
        return dataclasses.replace(options, out=options.out.absolute())

    def main(self, arguments: Iterable[str] | None = None) -> int:
        """Run the command; returns the exit status."""
        return script(self.command.rpartition(".")[2])(self._run)(arguments)

    def _run(self, arguments: Iterable[str] | None) -> int:
        started = time.monotonic()
        options = self.parse(arguments)
        with working_folder(options.out, self.command, whole=self.whole):
            if self.one_budget:
                check_settings(options.out / "settings.json", options.settings())
            data = self.prepare(options)
            if self.one_budget:
                keep_settings(options.out / "settings.json", options.settings())
            compared = (self.train or self._train)(options, data)
            facts = {**data.facts, **(self.measure(options, data, compared) if self.measure else {})}
            show(options.out, self.report(options, facts, compared), command_line(self.command, arguments), started)
        return compared.status

    def planned(self, options: Any, data: Data) -> list[PlannedTraining]:
        """The trainings of fairseq-train."""
        if self.plan is not None:
            return self.plan(options, data)
        arguments = functools.partial(self.arguments, options, data)
        return planned_trainings(options.models, range(1, options.seeds + 1), arguments)

    def _train(self, options: Any, data: Data) -> Results:
        """Run the trainings that are not complete, and read all complete ones."""
        earlier = [] if self.earlier is None else self.earlier(options, data)
        earlier_keys = {(record["model"], record["seed"]) for record in earlier}
        planned = [item for item in self.planned(options, data) if (item.model, item.seed) not in earlier_keys]
        programs = {(item.model, item.seed): item.training.program for item in planned}

        def read(model: str, seed: int, folder: Path, trained: TrainingResult) -> Record | None:
            parameters = read_parameters(folder) if programs[model, seed] is None else 0
            record = {"model": model, "seed": seed, "parameters": parameters, "seconds": trained.seconds}
            record |= {"peak_bytes": trained.peak_bytes, "command": trained.command}
            extra = self.read(options, folder, record)
            return None if extra is None else record | extra

        evaluate = None if self.evaluate is None else functools.partial(self.evaluate, options, data)
        compared = train_and_read(planned, options.out / self.runs, options.jobs, read, evaluate)
        return compared._replace(outcomes=[*earlier, *compared.outcomes])

    def report(self, options: Any, facts: Record, compared: Results) -> Report:
        """The tables, the stored results, and the picture."""
        records = compared.outcomes
        title, columns = (value(options, facts) if callable(value) else value for value in (self.title, self.columns))
        notes = self.notes(options, facts)
        if extra := getattr(options, "more", ()):
            notes = [*notes, f"further arguments of fairseq-train: {' '.join(extra)}"]
        models = options.models if self.order is None else self.order(options.models, records)
        tables = [table(title, columns, models, compared, notes, self.lacking)]
        if self.extra_tables is not None:
            tables += self.extra_tables(options, facts, records)
        content = {"plan": options.as_dict(), **facts, "results": records, "failed": compared.failed}
        draw = functools.partial(self.picture, options, facts, records) if self.picture and records else None
        return Report(tables, content, draw, self.picture_name)
