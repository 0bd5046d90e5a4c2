"""Experiments with language models on any text: options, names of models, the text in tokens, and perplexity."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import sentencepiece

from common.attention import ATTENTIONS

from .architectures import option_prefix
from .characters import spell_file
from .experiment import Budget, Data, Record, option, shell_words
from .json_files import read_json, write_json
from .scripts import positive_int
from .settings import begun_with, given
from .split_text import SPLITS, WRITER, binarise, count, split_path, take_file
from .subword_text import encode, train_sentencepiece
from .text_files import read_lines
from .trainings import read_points
from .variants import GATES, NO_POSITIONS, mechanism_of, variant_arguments, with_variants

#: A text of fewer bytes is read in characters: it has too few words, whose embeddings would be most parameters.
WORDS_FROM_BYTES = 20_000_000
#: Lines of a text with ``--quick``.
_QUICK_LINES = 400
LIMIT_HELP = "only the first lines of a text file"
FILE_HELP = "any text, or WikiText-103 as prepare --file takes it"
MODELS_HELP = "mechanisms, also with additions, as in NAME+forget+short_conv; default: %(default)s"
#: Folders in ``--out`` that are replaced, and who writes them.
WHOLE = {"data-bin": WRITER}
#: Architectures by mechanism, where it is not NAME_lm: the language model of the authors of Flow-Attention.
_ARCHITECTURES = {"flow": "flowformer_lm"}
#: Options that limit how far a token sees, or sees exactly.
_REACHES = ("window", "chunk_size")


def state_is_constant(name: str) -> bool:
    """Whether the decoding state of a model has the same size after any number of tokens."""
    return bool(ATTENTIONS[mechanism_of(name)].linear_cost)


def model_names() -> list[str]:
    """Every causal mechanism, alone and with our additions that it supports."""
    causal = [name for name, attention in ATTENTIONS.items() if "causal" in attention.supports]
    return causal + [name for mechanism in causal for name in with_variants(mechanism)[1:]]


def names_with_gates() -> list[str]:
    """``model_names()``, models with gates that do not read the tokens, and all of these without positions."""
    plain = [*model_names(), *(f"{name}+{gates}" for name in ("linear", "flow") for gates in GATES)]
    return plain + [name + NO_POSITIONS for name in plain]


def default_names() -> list[str]:
    """Softmax attention, every mechanism whose state is constant, and two of them with our additions."""
    plain = [name for name in model_names() if "+" not in name and state_is_constant(name)]
    return [
        "softmax",
        *plain,
        *(name + addition for name in ("flow", "linear") for addition in ("+forget", "+short_conv")),
    ]


def one_of(names: Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """The type of an option whose value is one of ``names()``."""

    def model(name: str) -> str:
        if name not in names():
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(names())}")
        return name

    return model


def models_option(names: Callable[[], Sequence[str]], default: Sequence[str]) -> list[str]:
    """The field ``models`` of options: some of ``names()``, and their ``default``."""
    return option(tuple(default), MODELS_HELP, setting=False, nargs="+", type=one_of(names), metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class LanguageModels(Budget):
    """The options of language models by fairseq-train, one for every causal mechanism."""

    #: Where fairseq finds the architectures.
    user_dir: ClassVar[str] = "fairseq_plugin"

    file: Path = option(None, FILE_HELP, setting=False, type=Path, required=True)
    characters: bool = option(
        False, "a character is a token: the default for small texts", setting=False, group="tokens"
    )
    words: bool = option(
        False, f"a word is a token: the default from {WORDS_FROM_BYTES:,} bytes on", setting=False, group="tokens"
    )
    subwords: int | None = option(
        None,
        "N subwords, learned from the train part",
        setting=False,
        group="tokens",
        type=positive_int,
        metavar="N",
    )
    limit: int | None = option(
        None,
        LIMIT_HELP,
        quick=_QUICK_LINES,
        setting=False,
        type=positive_int,
        metavar="LINES",
    )
    models: Sequence[str] = models_option(model_names, default_names())
    updates: int = option(1_600, "of every training (%(default)s)", quick=8)
    batch_tokens: int = option(2048)
    tokens_per_sample: int = option(256)
    width: int = option(128)
    heads: int = option(4)
    more: Sequence[str] = option(
        (), 'of fairseq-train, as in --more "--lineartime-post-norm"', type=shell_words, metavar="ARGUMENTS"
    )

    def completed(self) -> "LanguageModels":
        """See ``Options`` and ``check_batch``."""
        self.check_batch()
        return self

    def check_batch(self) -> None:
        """Raise ValueError if a sequence is longer than a batch."""
        if self.tokens_per_sample > self.batch_tokens:
            raise ValueError(
                f"--tokens-per-sample is {self.tokens_per_sample}; allowed: at most --batch-tokens, {self.batch_tokens}"
            )

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """The arguments of fairseq-train for a model and a seed, without the folder of checkpoints."""
        return [
            data,
            *self.model_arguments(name),
            *self.update_arguments(seed),
            *("--weight-decay", "0.01", "--lr-scheduler", "cosine", "--warmup-updates", max(1, self.updates // 16)),
            *("--sample-break-mode", "none", "--max-tokens", self.batch_tokens),
            *("--valid-subset", "valid,test"),  # the first one selects
            *self.more,
        ]

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that define a model."""
        return [
            *("--user-dir", self.user_dir, "--task", "language_modeling"),
            *self.attention_arguments(name),
            *("--decoder-layers", self.layers, "--decoder-attention-heads", self.heads),
            *("--decoder-embed-dim", self.width, "--decoder-ffn-embed-dim", 4 * self.width),
            *("--decoder-input-dim", self.width, "--decoder-output-dim", self.width),
            *"--share-decoder-input-output-embed --dropout 0.0".split(),  # a short training repeats little
            *("--tokens-per-sample", self.tokens_per_sample),
        ]

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of a model; its window or chunk, where it has one, is a quarter of a sequence."""
        attention = mechanism_of(name)
        architecture = _ARCHITECTURES.get(attention, f"{attention}_lm")
        prefix = option_prefix(architecture)
        arguments: list[object] = ["--arch", architecture]
        described = ATTENTIONS[attention].Options.described()
        for reach in _REACHES:
            if reach in described and not described[reach].speed_only:
                arguments += [prefix + reach.replace("_", "-"), max(1, self.tokens_per_sample // 4)]
        return arguments + variant_arguments(name, prefix)


@dataclass(frozen=True, kw_only=True)
class GateVariants(LanguageModels):
    """The options of language models whose gates may be fixed or learned, and that may lack positions."""

    def model_arguments(self, name: str) -> list[object]:
        """The arguments that define a model, the additional ones last."""
        arguments = super().model_arguments(name.removesuffix(NO_POSITIONS))
        if _gates(name):
            arguments[arguments.index("--user-dir") + 1] = "recipes/wikitext103/gate_variants"
        return [*arguments, *(["--no-token-positional-embeddings"] if name.endswith(NO_POSITIONS) else [])]

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of a model."""
        mechanism, gates = mechanism_of(name), _gates(name)
        if gates is None:
            return super().attention_arguments(name)
        forget = variant_arguments(f"{mechanism}+forget", f"--{mechanism}-")
        return ["--arch", f"{mechanism}_gate_variant", *forget, "--gates", gates]


def _gates(name: str) -> str | None:
    """The element of ``GATES`` in a model's name; None if its gates read the token or it has no gates."""
    return next((gates for gates in GATES if gates in name.split("+")[1:]), None)


def prepare(options: LanguageModels) -> Data:
    """The text of the options in tokens; the facts are the ``tokens`` of each split and the ``unit``, as "words".

    Raises:
        ValueError: there is no text, too little for so many subwords, or the folder was begun with another text.
    """
    size = options.file.stat().st_size if options.file.is_file() else WORDS_FROM_BYTES
    small = size < WORDS_FROM_BYTES and not (options.words or options.subwords)
    characters = options.characters or small
    unit = "characters" if characters else "subwords" if options.subwords else "words"
    tokens = tokenise(options.file.absolute(), options.out, characters, options.limit, options.subwords)
    return Data(options.out / "data-bin", {"tokens": tokens, "unit": unit})


def tokenise(path: Path, out: Path, characters: bool, limit: int | None, subwords: int | None = None) -> dict[str, int]:
    """Write the text at ``path`` to ``out``/data-bin unless it exists; returns the number of tokens of each split.

    Args:
        characters: a token is a character, otherwise a word or a subword.
        limit: lines of a text file that are used, from the first one; None: all.
        subwords: their number, including fairseq's four symbols; None: tokens are not subwords.

    Raises:
        ValueError: see ``prepare``.
    """
    if not path.exists():
        raise ValueError(f"--file is {path}, which does not exist; allowed: a text file, or what prepare --file takes")
    parts = [f"**/{split_path(path, split).name}" for split in SPLITS]  # of a folder
    settings = {**given("file", path, parts), "characters": characters, "lines": limit}
    settings |= {"subwords": subwords} if subwords else {}
    counts_path = out / "tokens.json"
    with begun_with(out / "text.json", settings, ("text",)):
        if not counts_path.exists():
            take_file(path, out / "text", limit)
            if subwords:
                _into_subwords(out / "text", subwords)
            for split in SPLITS if characters else ():
                spell_file(split_path(out / "text", split))
            binarise(out / "text", out / "data-bin", workers=1)
            write_json(counts_path, {split: count(split_path(out / "text", split)).tokens for split in SPLITS})
    return read_json(counts_path, **dict.fromkeys(SPLITS, int))


def _into_subwords(folder: Path, number: int) -> None:
    """Rewrite the three splits in subwords of a model of the train split, which is stored next to them."""
    model_path = folder / "sentencepiece.model"
    lines = (line.rstrip("\n") for line in read_lines(split_path(folder, "train")))
    train_sentencepiece(lines, model_path, number, masked=False, threads=1, option="--subwords")
    model = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    for split in SPLITS:
        path = split_path(folder, split)
        encode([[line.rstrip("\n")] for line in read_lines(path)], model, path, threads=1)


def read_perplexity(options: LanguageModels, folder: Path, known: Record) -> Record:
    """Test perplexity and bits per token of the checkpoint best on valid, and the speed of a complete training."""
    points = read_points(folder)
    valid, test = ({point.update: point.values for point in points if point.split == x} for x in SPLITS[1:])
    curve = sorted((update, values["ppl"]) for update, values in valid.items())
    best = min(valid, key=lambda update: valid[update]["ppl"])
    # One of four intervals contains an evaluation, which the median ignores.
    speed = statistics.median(point.values["wps"] for point in points if point.split == "train_inner")
    found = {"perplexity": test[best]["ppl"], "bits": test[best]["loss"]}  # perplexity has two digits, bits have three
    return {**found, "update": best, "curve": curve, "tokens_per_second": speed}
