"""All rows of a table as language models of one small size, which are trained in minutes on any text or images.

A row keeps what distinguishes it: its architecture, its options, one head or several, a head for each channel.
Widths and windows shrink in proportion. Gated attention units are two for a layer, as in the FLASH paper, with queries
of half the width, as in ``recipes.flash.compare``.
"""

import argparse
import functools
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from ..shared.comparison import PlannedTraining, planned_trainings
from ..shared.experiment import Data, Options, Record, option, train_arguments
from ..shared.language_models import FILE_HELP, LanguageModels
from ..shared.mnist import DATA_HELP, identity_of
from ..shared.scripts import positive_int
from .building import fairseq_options
from .entries import Entries, entries_of
from .measured import published_cells, value
from .tables import PAPERS, PublishedTable, names_like, read_paper
from .trainings import NotTrained, Training, trainings_of

COMMAND = "recipes.papers.compare"
#: The command for image models.
IMAGES = "recipes.papers.compare_images"
LARGER = "recipes.papers.larger_images"
#: The default folder of a comparison.
FOLDER = Path("work/papers/PAPER_TABLE")
#: Tokens of a sequence of a text.
_TOKENS = 128


class Values(NamedTuple):
    """The column of a table that is compared with small language models, and the kind of its numbers."""

    column: str
    bits: bool = False  # bits per token, not perplexity
    masked: bool = False  # whether each row also has a masked model
    post_norm: bool = False  # whether its models are compared pre-norm and post-norm


TABLES = {
    ("flowformer", "4"): Values("PERPLEXITY", post_norm=True),
    ("flash", "1"): Values("PPLX (LM/MLM)", masked=True),
    ("flash", "2"): Values("PPLX (LM/MLM)", masked=True),
    ("daft", "4"): Values("Test loss", bits=True),
    ("daft", "5"): Values("Test bpc", bits=True),
}
#: The tables of image models -> the columns that are compared; each column has its own model.
IMAGE_TABLES = {
    ("flowformer", "5"): ("TOP-1 ACC.",),
    ("daft", "2"): ("Top1 Acc",),
    ("daft", "6"): ("Top 1 Acc",),
    ("daft", "7"): ("Top 1 Acc",),
    ("daft", "8"): ("11", "15"),
}
#: All causal models of FLASH's Table 13; Table 12 has the masked ones.
_SEVEN = (
    "python -m recipes.flash.compare --file TEXT --seeds 3 "
    "--archs transformer_lm transformer_plus_lm transformer_pp_lm performer_lm combiner_lm flash_quad_lm flash_lm"
)
_SERIES = (
    "dtw hist_gradient_boosting rocket lstm tcn softmax linear reformer longformer favor yoso cosformer flowformer"
)
_EPISODES = "bc awac softmax linear reformer favor cosformer flowformer"
#: Other tables -> the command of the recipe that trains their rows in small.
_ELSEWHERE = {
    ("flowformer", "2"): "python -m recipes.lra.compare --table 2 --length 256",
    ("flowformer", "3"): "python -m recipes.lra.compare --table 2 --length 256",
    ("flowformer", "6"): f"python -m recipes.time_series.compare --dataset JapaneseVowels --seeds 3 --models {_SERIES}",
    ("flowformer", "7"): f"python -m recipes.offline_rl.compare --models {_EPISODES}",
    ("flowformer", "10"): "python -m recipes.lra.compare --table 10 --length 256",
    ("flowformer", "11"): "python -m recipes.lra.compare --table 11 --length 256",
    ("daft", "3"): f"python -m {LARGER}",
    ("flash", "beside-figure-3"): "python -m recipes.flash.compare --file TEXT --figure 3",
    ("flash", "5"): "python -m recipes.flash.compare --file TEXT --seeds 3 "
    "--archs flash_quad_lm flash_lm transformer_pp_lm mc_transformer_pp_lm",
    ("flash", "11"): "LINEARTIME_CPU_KERNELS=0 python -m recipes.flash.speed",
    ("flash", "12"): _SEVEN.replace("_lm", "_mlm"),
    ("flash", "13"): _SEVEN,
}
#: Options that choose another form of all rows, in a folder of its own; fields of ``Values`` say for which tables.
_FORMS = ("masked", "post_norm")
#: Options of a mechanism that shrink with the sequences.
_REACHES = ("daft_window", "local_window")


def small_command(paper: str, table: str) -> str | None:
    """The command that trains all rows of a table in small; None if no recipe does."""
    if (paper, table) in TABLES:
        return f"python -m {COMMAND} {paper} {table} --file TEXT"
    if (paper, table) in IMAGE_TABLES:
        return f"python -m {IMAGES} {paper} {table}"
    return _ELSEWHERE.get((paper, table))


@dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """The options of a comparison of the rows of a published table; ``models`` are rows."""

    out: Path = option(FOLDER, "default: %(default)s", setting=False, type=Path)
    models: Sequence[str] = ()
    paper: str = option(None, ", ".join(PAPERS), names=("paper",), metavar="PAPER", type=str.lower, choices=PAPERS)
    table: str = option(
        None, "as python -m recipes.papers lists them", names=("table",), metavar="TABLE", type=str.lower
    )

    @property
    def published(self) -> PublishedTable:
        """The table as printed."""
        return read_paper(self.paper).tables[self.table]

    @property
    def entries(self) -> Entries:
        """The entries of the table."""
        return entries_of(self.paper)[self.table]

    def folder(self, *more: str) -> Path:
        """``out``, or by default a folder whose name has the table and ``more``."""
        return FOLDER.with_name("_".join([self.paper, self.table, *more])) if self.out == FOLDER else self.out

    def check_table(self, known: Iterable[tuple[str, str]]) -> None:
        """Raise argparse.ArgumentTypeError if the table is not among the ``known`` ones of the command."""
        if (self.paper, self.table) not in known:
            here = [number for name, number in known if name == self.paper]
            command = small_command(self.paper, self.table)
            hint = f"; its rows in small: {command}" if command else ""
            allowed = f"allowed for {self.paper}: {', '.join(here) or 'none'}{hint}"
            raise argparse.ArgumentTypeError(f"TABLE is {self.table}; {allowed}")


@dataclass(frozen=True, kw_only=True)
class Rows(TableOptions, LanguageModels):
    """The options of a table's rows as language models; ``models`` are the names of rows."""

    most_evaluations: ClassVar[int] = 2

    updates: int = option(300, "of every training (%(default)s)", quick=8)
    width: int = option(64)
    tokens_per_sample: int | None = option(None, f"of --file; default: {_TOKENS}", type=positive_int, metavar="TOKENS")
    file: Path | None = option(None, FILE_HELP, setting=False, type=Path, group="source")
    pixels: int | None = option(
        None,
        "the grey values of SIDE x SIDE pixels of every image, in place of --file; sequences are images",
        setting=False,
        type=positive_int,
        metavar="SIDE",
        group="source",
    )
    data_dir: Path | None = option(None, f"of --pixels: {DATA_HELP}", setting=False, type=Path, metavar="DIR")
    rows: Sequence[str] | None = option(
        None, "of the table; default: all that are models here", setting=False, nargs="+", metavar="NAME"
    )
    masked: bool = option(False, "FLASH's masked models, not the causal ones")
    post_norm: bool = option(False, "LayerNorm after each block, as in the Flowformer paper's equation 9")

    def completed(self) -> "Rows":
        """The options with the models of the rows and the folder of this comparison.

        Raises:
            argparse.ArgumentTypeError: an unknown table or row, or one without such models.
            ValueError: sequences that are longer than a batch.
        """
        self.check_table(TABLES)
        if self.data_dir is not None and self.pixels is None:
            raise argparse.ArgumentTypeError(f"--data-dir is {self.data_dir}; allowed: with --pixels")
        forms = [name for name in _FORMS if getattr(self, name)]
        for name in forms:
            if not getattr(self.values, name):
                allowed = ", ".join(" ".join(key) for key, values in TABLES.items() if getattr(values, name))
                typed = f"--{name.replace('_', '-')} is given with {self.paper} {self.table}"
                raise argparse.ArgumentTypeError(f"{typed}; allowed: {allowed}")
        completed = replace(self, models=self._chosen_rows(), out=self.folder(*forms))
        if self.file is None:
            return completed._of_pixels()
        completed = replace(completed, tokens_per_sample=self.tokens_per_sample or _TOKENS)
        completed.check_batch()
        return completed

    def _of_pixels(self) -> "Rows":
        """The options with images as the text, each of which is a sequence.

        Raises:
            argparse.ArgumentTypeError: no size of the images, or tokens other than pixels.
            ValueError: an image is longer than a batch.
        """
        if self.pixels is None:
            raise argparse.ArgumentTypeError("no text is given; allowed: one of --file and --pixels")
        if self.characters or self.subwords:
            raise argparse.ArgumentTypeError("--characters or --subwords is given with --pixels; allowed: with --file")
        if self.tokens_per_sample is not None:
            typed = f"--tokens-per-sample is {self.tokens_per_sample}"
            raise argparse.ArgumentTypeError(f"{typed}; allowed: with --file, as with --pixels sequences are images")
        tokens = self.pixels**2 + 1  # with the end of an image
        if tokens > self.batch_tokens:
            allowed = f"images of at most --batch-tokens, {self.batch_tokens}"
            raise ValueError(f"--pixels is {self.pixels}, {tokens} tokens for each image; allowed: {allowed}")
        return replace(self, words=True, tokens_per_sample=tokens)

    @functools.cached_property
    def images(self) -> str:
        """The images of ``--pixels``; see ``identity_of``."""
        return identity_of(self.data_dir)

    def settings(self) -> Record:
        """See ``Options``; with the images of ``--pixels``."""
        return {**super().settings(), **({"images": self.images} if self.pixels else {})}

    def _chosen_rows(self) -> list[str]:
        """The rows that ``rows`` selects, in the published order."""
        entries = self.entries
        trained = trained_rows(self.paper, self.table, self.masked)
        if self.rows is None:
            return trained
        chosen = set()
        for name in self.rows:
            matches = names_like(entries, name)
            if len(matches) != 1:
                raise argparse.ArgumentTypeError(f"--rows has {name}; allowed: {'; '.join(matches or trained)}")
            if isinstance(entries[matches[0]], NotTrained):
                reason = entries[matches[0]].reason
                raise argparse.ArgumentTypeError(f"--rows has {name}: {reason}; allowed: {'; '.join(trained)}")
            chosen.add(matches[0])
        return [row for row in trained if row in chosen]

    def model_arguments(self, name: str) -> list[object]:
        """The arguments from which the model of a row is built."""
        training = self._training(name)
        task = ("masked_lm", "--criterion", "masked_lm") if self.masked else ("language_modeling",)
        sizes = self._shape(training) | self._mechanism(training)
        return [
            *("--user-dir", "fairseq_plugin", "--task", *task, "--arch", *shlex.split(training.model)),
            *(word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", size)),
            *("--dropout", "0.0", "--tokens-per-sample", self.tokens_per_sample),  # a short training repeats little
            *["--lineartime-post-norm"] * self.post_norm,
        ]

    def _training(self, row: str) -> Training:
        return trainings_of(self.entries[row])[int(self.masked)]

    def _shape(self, training: Training) -> dict[str, int]:
        """Widths, layers and heads by the names of options."""
        side = "encoder" if self.masked else "decoder"
        published = fairseq_options(training)
        width, heads = (getattr(published, f"{side}_{name}") for name in ("embed_dim", "attention_heads"))
        ffn = getattr(published, f"{side}_ffn_embed_dim", None)
        shape = {
            f"{side}_embed_dim": self.width,
            f"{side}_layers": 2 * self.layers if _of_units(training) else self.layers,
            f"{side}_attention_heads": {1: 1, width: self.width}.get(heads, self.heads),
        }
        if not self.masked:
            shape |= {"decoder_input_dim": self.width, "decoder_output_dim": self.width}
        if ffn is not None:  # else a multiple of the width
            shape[f"{side}_ffn_embed_dim"] = round(ffn * self.width / width)
        return shape

    def _mechanism(self, training: Training) -> dict[str, int]:
        """Sizes of the row's own mechanism."""
        published = vars(fairseq_options(training))
        shorter = self.tokens_per_sample / published["tokens_per_sample"]
        sizes = {name: max(1, round(published[name] * shorter)) for name in _REACHES if name in published}
        if _of_units(training):
            sizes["flash_query_dim"] = self.width // 2
        if "daft_bias_dim" in published:
            sizes["daft_bias_dim"] = max(1, self.width // 4)  # as 128 is of 512
        if "sparse_stride" in published:  # as the paper of Sparse Transformers chooses it
            sizes["sparse_stride"] = math.isqrt(self.tokens_per_sample)
        return sizes

    @property
    def depth(self) -> str:
        """The layers in words."""
        norms = ["pre-norm, ", "post-norm, "][self.post_norm] if self.values.post_norm else ""
        of_units = any(map(_of_units, map(self._training, self.models)))
        return f"{norms}{self.layers} layers" + (f", or {2 * self.layers} gated attention units," if of_units else "")

    @property
    def values(self) -> Values:
        """The column of the table that is compared, and the kind of its numbers."""
        return TABLES[self.paper, self.table]

    def published_cells(self) -> dict[str, str]:
        """The published cell of each row, by the row's name."""
        return published_cells(self.published, self.values.column, self.models, int(self.masked))

    def not_run(self) -> dict[str, str]:
        """The rows that are not among the models, and why."""
        return {
            row: entry.reason if isinstance(entry, NotTrained) else "not asked for"
            for row, entry in self.entries.items()
            if row not in self.models
        }


def trained_rows(paper: str, table: str, masked: bool = False) -> list[str]:
    """The rows of a table that are models here, in the published order: the best first."""
    rows = [row for row, entry in entries_of(paper)[table].items() if trainings_of(entry)]
    cells = published_cells(read_paper(paper).tables[table], TABLES[paper, table].column, rows, int(masked))
    return sorted(rows, key=lambda row: value(cells[row]))


def folder_of(row: str) -> str:
    """The name of a row in lower-case letters and digits."""
    return re.sub(r"[^a-z0-9]+", "_", row.lower()).strip("_")


def _of_units(training: Training) -> bool:
    """Whether its layers are gated attention units."""
    return training.model.startswith("flash")


def planned_rows(options: Rows, data: Data) -> list[PlannedTraining]:
    """Every row with every seed; folders have the names of rows in lower case."""
    arguments = functools.partial(train_arguments, options, data)
    return [
        planned._replace(training=planned.training._replace(name=f"{folder_of(planned.model)}.{planned.seed}"))
        for planned in planned_trainings(options.models, range(1, options.seeds + 1), arguments)
    ]
