"""Train fairseq's transformer and Flowformer with every cross-attention to translate messages; BLEU, chrF and speed.

``python -m recipes.translation.compare --seeds 3`` from the checkout's root, through fairseq-train and
fairseq-generate. Another run continues where the last one stopped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import sacrebleu
import sentencepiece
from matplotlib import pyplot as plt

from ..shared.comparison import MODEL, SEEDS, Column, Results, by_length, of_model, table
from ..shared.encoder_decoders import (
    CROSS_ATTENTIONS,
    STOCK,
    EncoderDecoders,
    generate,
    model_notes,
    models_option,
    read,
)
from ..shared.experiment import MINUTES, PARAMETERS, Data, Experiment, Record, mean, median, option
from ..shared.fairseq_log import parse_generation
from ..shared.json_files import read_json, write_json
from ..shared.plots import STYLE, lines_by_length, save, seeds_in_rows
from ..shared.scripts import positive_int
from ..shared.tables import Table
from ..shared.text_files import TRIAL_PARTS, read_lines
from . import prepare
from .catalogues import ENGLISH, FOLDERS
from .speed import STEPS, Speed, measure

DEFAULT_MODELS = (STOCK, *(f"flow/{cross}" for cross in CROSS_ATTENTIONS))
#: A translation may have this many subwords for each of its source, and some more.
_LONGEST = (1.5, 10)


class Scores(NamedTuple):
    """Scores of the generated translations of the test part, sacrebleu's, of texts without subwords."""

    bleu: float
    chrf: float
    milliseconds: float  # to generate a translation


@dataclass(frozen=True, kw_only=True)
class Translation(EncoderDecoders):
    """The options of encoder-decoders that translate messages."""

    counted: ClassVar[type] = Scores
    label_smoothing: ClassVar[float] = 0.1
    most_evaluations: ClassVar[int] = 4

    folder: Sequence[Path] = option(FOLDERS, prepare.FOLDER_HELP, setting=False, type=Path, nargs="+", metavar="DIR")
    source: str = option(ENGLISH, prepare.SOURCE_HELP, metavar="LANGUAGE")
    target: str = option("de", prepare.TARGET_HELP, metavar="LANGUAGE")
    subwords: int = option(prepare.SUBWORDS, prepare.SUBWORDS_HELP, quick=500)
    models: Sequence[str] = models_option(DEFAULT_MODELS)
    updates: int = option(3_000, "of every training (%(default)s)", quick=4)
    batch_tokens: int = option(1_024, "of the longer side of a batch (%(default)s)")
    width: int = option(128)
    layers: int = option(2)
    lengths: Sequence[int] = option(
        (128, 512, 2_048, 8_192),
        "subwords of the sources whose translation is timed; default: %(default)s",
        quick=[32],
        setting=False,
        type=positive_int,
        nargs="+",
        metavar="TOKENS",
    )

    def settings(self) -> Record:
        """See ``Options``; no folder has results that were scored in another way."""
        return {**super().settings(), "scoring": "sacrebleu of decoded texts"}

    @property
    def languages(self) -> tuple[str, str]:
        """See ``EncoderDecoders``."""
        return self.source, self.target

    def batch_arguments(self) -> list[object]:
        """See ``EncoderDecoders``."""
        return ["--max-tokens", self.batch_tokens]

    def longest_arguments(self) -> list[object]:
        """fairseq's defaults: no message has so many subwords."""
        return []

    def generate_arguments(self) -> list[object]:
        """Batches of sources of similar lengths."""
        return ["--batch-size", 64, "--max-len-a", _LONGEST[0], "--max-len-b", _LONGEST[1]]

    def count(self, lines: Sequence[str]) -> Scores:
        """See ``EncoderDecoders``; the references are the messages themselves, which subwords do not always spell.

        Raises:
            ValueError: the log ends too early, or is not of the test part.
        """
        generation = parse_generation(lines)
        references = [line.rstrip("\n") for line in read_lines(prepare.text_path(self.out, "test", self.target))]
        if sorted(generation.pairs) != list(range(len(references))):
            number = len(generation.pairs)
            raise ValueError(f"the log of fairseq-generate has {number} messages; allowed: all {len(references)}")
        model = sentencepiece.SentencePieceProcessor(model_file=str(prepare.subwords_path(self.out)))
        hypotheses = [model.decode(generation.pairs[number][1].split()) for number in range(len(references))]
        bleu, chrf = (score(hypotheses, [references]) for score in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf))
        return Scores(bleu.score, chrf.score, generation.milliseconds)


def data(options: Translation) -> Data:
    """The messages in subwords; the facts are the size of each part, and the BLEU of copied sources.

    Raises:
        ValueError: a message does not fit into a batch; see also ``prepare.prepare``.
    """
    settings = prepare.Settings(*options.languages, options.subwords)
    manifest = prepare.prepare(options.folder, options.out, settings)
    paths = (options.out / "pieces" / f"{part}.{language}" for part in TRIAL_PARTS for language in options.languages)
    pieces = (line.split() for path in paths for line in read_lines(path))
    longest = max(map(len, pieces)) + 1  # with </s>
    if longest > options.batch_tokens:  # fairseq-train would leave it out, or fail in the first evaluation
        allowed = f"at least {longest}, the subwords of the longest message"
        raise ValueError(f"--batch-tokens is {options.batch_tokens}; allowed: {allowed}")
    parts = {part: [about["pairs"], len(about["programs"])] for part, about in manifest["parts"].items()}
    return Data(options.out / "data-bin", {"parts": parts, "copied_bleu": manifest["copied_bleu"]})


def speeds(options: Translation, data: Data, compared: Results) -> Record:
    """Times of generation by the length of the source, of all models in one run; measured again for other models."""
    path, asked = options.out / "speed.json", {"models": list(options.models), "lengths": list(options.lengths)}
    kinds = {"asked": dict, "measured": list[Speed]}
    if not compared.interrupted and (not path.exists() or read_json(path, **kinds)["asked"] != asked):
        measured = measure(options, data.folder, options.lengths)
        write_json(path, {"asked": asked, "measured": [speed._asdict() for speed in measured]})
    measured = read_json(path, **kinds)["measured"] if path.exists() else []
    return {"speeds": [speed._asdict() for speed in measured]}


def notes(options: Translation, facts: Record) -> list[str]:
    """Notes below the table."""
    parts = ", ".join(f"{part} {pairs:,} of {programs} programs" for part, (pairs, programs) in facts["parts"].items())
    return [
        f"messages from {options.source} to {options.target}: {parts}; {options.subwords:,} subwords for both",
        f"BLEU and chrF: sacrebleu's, of the text of the test part, fairseq-generate with --beam {options.beam}; "
        f"copied sources have a BLEU of {facts['copied_bleu']:.1f}; mean ± standard deviation over seeds",
        "next: per cent of the subwords of the valid part, </s> included, the right ones before given",
        f"{options.updates:,} updates of at most {options.batch_tokens:,} subwords, {options.layers} + "
        f"{options.layers} layers of width {options.width}, {options.heads} heads, highest learning rate "
        f"{options.lr:g} for all; the checkpoint best on valid",
        *model_notes(options.models),
        "minutes to train, and milliseconds for an update and to generate a message in batches of 64: one thread of "
        "this machine, with whatever else it did",
    ]


def extra_tables(options: Translation, facts: Record, records: list[Record]) -> list[Table]:
    """Times of generation by the length of the source."""

    def cell(of_length: list[Record]) -> str:
        faster = of_length[0]["faster"]
        return f"{of_length[0]['milliseconds']:,.0f}" + ("" if faster is None else f" ({faster:.2f}x)")

    lengths = sorted({speed["length"] for speed in facts["speeds"]})
    notes = [
        f"the encoder and {STEPS} steps with a beam of {options.beam}, models of the same sizes with new weights; one "
        "thread; median of interleaved rounds",
        f"in parentheses how many translations are made in the time of one of {STOCK}, the median over the rounds",
    ]
    title = f"Milliseconds to generate {STEPS} subwords, by subwords of the source"
    return [table(title, [MODEL, *by_length(lengths, cell)], options.models, Results(facts["speeds"], {}), notes)]


def draw(options: Translation, facts: Record, records: Sequence[Record], path: Path) -> None:
    """Draw the BLEU of all seeds, and the time of a translation by the length of its source."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
        seeds_in_rows(left, {name: [x["bleu"] for x in of_model(records, name)] for name in options.models})
        left.axvline(facts["copied_bleu"], color="gray", linestyle="--")
        left.annotate("copied sources ", (facts["copied_bleu"], -0.55), fontsize=8, color="gray", ha="right")
        left.set(xlabel="BLEU of programs that were not trained on", title="a dot for each seed, a line for the mean")
        left.set_xlim(left=0.0)
        # Other work on the machine disturbs times, but not much their ratios, which are of the same rounds.
        value = "faster" if STOCK in options.models else "milliseconds"
        points = {
            name: [(speed["length"], speed[value]) for speed in of_model(facts["speeds"], name)]
            for name in options.models
        }
        lines_by_length(right, points)
        unit = f"translations in the time of one of {STOCK}" if value == "faster" else "ms for a translation"
        right.set(xlabel="subwords of the source", ylabel=unit, title=f"{STEPS} subwords generated, on one thread")
        save(figure, path, dpi=130)


EXPERIMENT = Experiment(
    command="recipes.translation.compare",
    about=__doc__.splitlines()[0],
    options=Translation,
    title="Translation of messages with one budget",
    columns=(
        MODEL,
        PARAMETERS,
        Column("BLEU", mean("bleu", 1)),
        Column("chrF", mean("chrf", 1)),
        Column("next", mean("next", 1)),
        SEEDS,
        Column("ms/message", median("milliseconds")),
        Column("ms/update", median("seconds_per_update", 1000)),
        MINUTES,
    ),
    notes=notes,
    prepare=data,
    read=read,
    evaluate=generate,
    measure=speeds,
    extra_tables=extra_tables,
    picture=draw,
    whole={"data-bin": prepare.WRITER},
    lacking="failed",
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
