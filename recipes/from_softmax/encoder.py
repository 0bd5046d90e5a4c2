"""Make linear-time encoders of a pretrained one like BERT, in every form, and print what of its embeddings is left.

``python -m recipes.from_softmax.encoder --folder DIR --file FILE`` from the checkout's root: DIR has config.json,
model.safetensors and tokenizer.json or vocab.txt, FILE any text. Its attention is exchanged, and learns in two stages
to do what softmax attention did. Complete forms are kept; another run continues with the next one.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from ..shared.comparison import MODEL, SEEDS, Column, Results, by_model, make_records, of_model
from ..shared.experiment import PARAMETERS, Data, Experiment, Record, option
from ..shared.json_files import read_record
from ..shared.plots import STYLE, legend_beside, save, style_of
from ..shared.settings import given
from ..shared.tables import MISSING, spread
from ..shared.working_folder import atomic_write
from .bert import Bert, read_bert, write_checkpoint
from .encoder_models import LINEAR_ALONE, draw_batches, embed, train_distillation, train_transfer
from .forms import PLAIN, Form, form
from .sentences import read_texts
from .stages import DISTILLED, EXCHANGED, TEACHER, TRANSFERRED, Forms, folder_name, models_option

COMMAND = "recipes.from_softmax.encoder"
#: The folder of converted models, with the dictionary of all of them.
RUNS = "runs"
#: What is measured: the cosine with the teacher's embeddings, and how often the other text of a pair is the nearest.
COSINE, NEAREST = "cosine", "nearest"
#: The files of an encoder.
_READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "*.safetensors", "*.bin")
_STAGES = {EXCHANGED: "exchanged", TRANSFERRED: "after stage 1", DISTILLED: "after stage 2"}


@dataclass(frozen=True, kw_only=True)
class EncoderConversion(Forms):
    """The options of the conversion of a pretrained encoder."""

    folder: Path = option(
        None, "the encoder: config.json, model.safetensors and its tokenizer", setting=False, type=Path, required=True
    )
    file: Path = option(None, "any text, to learn from", setting=False, type=Path, required=True)
    pairs: Path | None = option(
        None,
        "two texts that belong together in each line, with a tab between them; default: halves of paragraphs of "
        "--file that are not learned from",
        setting=False,
        type=Path,
    )
    models: Sequence[str] = models_option(PLAIN)
    seeds: int = option(1, "runs of each model (%(default)s)", setting=False)
    updates: int = option(100, "of each stage (%(default)s)", quick=2)
    batch: int = option(32, "texts of an update (%(default)s)", quick=4)
    longest: int = option(64, "tokens of a text, at most (%(default)s)")
    transfer_lr: float = option(1e-3, "highest, of stage 1 (%(default)s)")
    distillation_lr: float = option(3e-4, "highest, of stage 2 (%(default)s)")
    jobs: int = 1

    def completed(self) -> "EncoderConversion":
        """The options; ValueError if texts have no room for a token."""
        if self.longest < 3:
            raise ValueError(f"--longest is {self.longest}; allowed: at least 3, a token between <s> and </s>")
        return self

    def settings(self) -> Record:
        """See ``Options``; with names and SHA-256 of what is read."""
        read = given("folder", self.folder, _READ) | given("file", self.file) | given("pairs", self.pairs)
        return {**read, **super().settings()}


class Made(NamedTuple):
    """Stored results of a form."""

    parameters: int
    learned: int
    measures: dict[str, dict[str, float]]
    seconds: dict[str, float]


class Conversions:
    """Converts an encoder to each form, and keeps the models and results in the experiment's folder."""

    def __init__(self, options: EncoderConversion) -> None:
        torch.set_num_threads(1)
        self.options, self.runs = options, options.out / RUNS
        self.bert, texts = read_bert(options.folder), read_texts(options.file, options.pairs)
        self.padding = self.bert.dictionary.pad()
        self.texts = [self.bert.encode(text, options.longest) for text in texts.train]
        self.pairs = [self.bert.encode(text, options.longest) for side in zip(*texts.pairs) for text in side]
        self.teacher = self.bert.build("softmax_mlm")
        self.wanted = embed(self.teacher, self.pairs, self.padding)

    def run(self) -> Results:
        """Train and measure what is missing; returns the record of the teacher, and of each form and seed."""
        if not (self.runs / "dict.txt").exists():
            with atomic_write(self.runs / "dict.txt") as part:
                self.bert.dictionary.save(str(part))
        if not (self.runs / f"{TEACHER}.pt").exists():
            write_checkpoint(self.runs / f"{TEACHER}.pt", self.teacher, self.bert.command("softmax_mlm"))
        teacher = Made(_count(self.teacher), 0, {DISTILLED: self._measure(self.teacher)}, {})
        seeds = range(1, self.options.seeds + 1)
        paths = {
            (name, seed): self.runs / f"{folder_name(name, name, seed)}.json"
            for name in self.options.models
            for seed in seeds
        }
        compared = make_records((path, functools.partial(self._convert, *key)) for key, path in paths.items())
        records = [
            {"model": name, "seed": seed, **read_record(path, Made)._asdict()}
            for (name, seed), path in paths.items()
            if path.exists()
        ]
        return compared._replace(outcomes=[{"model": TEACHER, "seed": 1, **teacher._asdict()}, *records])

    def _convert(self, name: str, seed: int) -> Record:
        """Convert the encoder to the form ``name``, and write the model; see ``Made``."""
        options, kind = self.options, _form(self.options, name, self.bert)
        learning = ("--lineartime-trained-parameters", "new" if kind.learns_maps else "attention")
        student = self.bert.build("hybrid_mlm", [*kind.arguments(), *learning], seed)
        learned = sum(x.numel() for x in student.parameters() if x.requires_grad)
        measures, seconds = {EXCHANGED: self._measure(student)}, {}
        started = time.monotonic()
        train_transfer(student, self.teacher, self._batches(seed), self.padding, options.transfer_lr, kind.windowed)
        seconds[TRANSFERRED] = time.monotonic() - started
        measures[TRANSFERRED] = self._measure(student)
        started = time.monotonic()
        batches = self._batches(seed + 1_000)
        train_distillation(student, self.teacher, batches, self.padding, options.distillation_lr)
        seconds[DISTILLED] = time.monotonic() - started
        measures[DISTILLED] = self._measure(student)
        path = self.runs / f"{folder_name(name, name, seed)}.pt"
        write_checkpoint(path, student, self.bert.command("hybrid_mlm", kind.arguments()))
        return Made(_count(student), learned, measures, seconds)._asdict()

    def _batches(self, seed: int) -> Sequence[Tensor]:
        options = self.options
        return list(draw_batches(self.texts, options.batch, options.updates, self.padding, seed))

    def _measure(self, model: nn.Module) -> dict[str, float]:
        """See ``COSINE`` and ``NEAREST``, which is in per cent."""
        embeddings = embed(model, self.pairs, self.padding)
        first, second = embeddings.chunk(2)
        nearest = (first @ second.T).argmax(1) == torch.arange(len(first))
        cosines = (embeddings * self.wanted).sum(1)
        return {COSINE: float(cosines.mean()), NEAREST: 100.0 * float(nearest.double().mean())}


def _form(options: EncoderConversion, name: str, bert: Bert) -> Form:
    return form(name, bert.model.num_layers, options.windows_of_forms)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def prepare(options: EncoderConversion) -> Data:
    """Read the text and the encoder; the facts are about them.

    Raises:
        ValueError: one of them cannot be read, the encoder has too few positions or layers, or a form is invalid.
    """
    if not options.file.is_file():
        raise ValueError(f"--file is {options.file}, which is no file; allowed: a text file in UTF-8")
    if not (options.folder / "config.json").is_file():
        raise ValueError(
            f"--folder is {options.folder}, which has no config.json; allowed: a folder with config.json, "
            "model.safetensors and a tokenizer, such as the one in recipes/from_softmax/README.md"
        )
    bert = read_bert(options.folder)
    texts = read_texts(options.file, options.pairs)
    if options.longest > bert.model.max_positions:
        raise ValueError(
            f"--longest is {options.longest}; allowed: at most {bert.model.max_positions}, the positions of "
            f"the encoder in {options.folder}"
        )
    for name in options.models:
        _form(options, name, bert)
    sizes = {"layers": bert.model.num_layers, "width": bert.model.embed_dim}
    return Data(options.out, {"texts": len(texts.train), "pairs_of_texts": len(texts.pairs), **sizes})


def _cell(stage: str, measure: str, digits: int) -> Callable[[Sequence[Record]], str]:
    def cell(records: Sequence[Record]) -> str:
        return spread([x["measures"][stage][measure] for x in records if stage in x["measures"]], digits)

    return cell


def _learned(records: Sequence[Record]) -> str:
    return f"{records[0]['learned']:,}" if records[0]["learned"] else MISSING


def _seconds(records: Sequence[Record]) -> str:
    seconds = [sum(record["seconds"].values()) for record in records]
    return f"{statistics.median(seconds):,.0f}" if any(seconds) else MISSING


COLUMNS = (
    MODEL,
    PARAMETERS,
    Column("learn in stage 1", _learned),
    *(Column(f"cosine, {word}", _cell(stage, COSINE, 3)) for stage, word in _STAGES.items()),
    *(Column(f"pairs found, {word}, %", _cell(stage, NEAREST, 1)) for stage, word in _STAGES.items()),
    SEEDS,
    Column("seconds", _seconds),
)


def notes(options: EncoderConversion, facts: Record) -> list[str]:
    """Notes below the table."""
    pairs = "halves of paragraphs that are not learned from" if options.pairs is None else options.pairs
    return [
        f"an encoder of {facts['layers']} layers of width {facts['width']}; texts of at most {options.longest} tokens; "
        f"{facts['texts']:,} to learn from, {facts['pairs_of_texts']:,} pairs to measure: {pairs}",
        "cosine: of the embeddings of these texts, means over all tokens of the last layer, with the teacher's; pairs "
        "found: how often the other text of a pair is the nearest to the first one among all second ones",
        "the teacher is the encoder as it was read, with softmax attention; exchanged: its weights under another "
        f"attention; stage 1: attention transfer, {options.updates:,} updates of {options.batch} texts, learning rate "
        f"{options.transfer_lr:g}; stage 2: distillation of the outputs of all layers and of the embeddings, as many "
        f"updates, learning rate {options.distillation_lr:g}",
        f"{options.window_note()}; in stage 1 the linear part of lolcats learns by itself in {LINEAR_ALONE:g} of the "
        "updates",
    ]


def draw(options: EncoderConversion, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Draw both measures by stage, means over seeds."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
        labels = {COSINE: "cosine with the teacher's embeddings", NEAREST: "pairs found, %"}
        for axes, (measure, label) in zip(panels, labels.items()):
            for teacher in of_model(records, TEACHER):
                axes.axhline(teacher["measures"][DISTILLED][measure], color="0.5", linestyle="--", label=TEACHER)
            for i, (name, made) in enumerate(by_model(records, options.models).items()):
                means = [statistics.mean(x["measures"][stage][measure] for x in made) for stage in _STAGES]
                style = style_of(i)
                axes.plot(range(len(means)), means, marker=style.marker, label=name, **style.line)
            axes.set_xticks(range(len(_STAGES)), list(_STAGES.values()))
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0.0)
            axes.grid(alpha=0.25, axis="y")
        legend_beside(panels[1])
        save(figure, path, dpi=130)


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=EncoderConversion,
    title="A pretrained encoder in linear time",
    columns=COLUMNS,
    order=lambda models, records: [*([TEACHER] if of_model(records, TEACHER) else []), *models],
    notes=notes,
    prepare=prepare,
    train=lambda options, data: Conversions(options).run(),
    picture=draw,
    runs=RUNS,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
