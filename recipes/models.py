"""Language models of every causal attention with one budget: their names, arguments of fairseq-train, and results.

A name is that of a mechanism, with additions: linear+forget, flow+forget+short_conv, softmax+no_positions.
"""

import argparse
import shlex
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from fairseq import options as fairseq_options
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from torch import nn

import fairseq_plugin  # noqa: F401  registers the architectures
from common.attention import ATTENTIONS, options_of, supporting

from . import runs, texts

#: Taps of a short convolution, as in today's layers of linear attention.
_TAPS = 4
#: Addition to a mechanism's name, in this order -> the option that it sets, and its value.
_ADDITIONS = {
    "+forget": ("forget", "head"),
    "+forget_channel": ("forget", "channel"),
    "+short_conv": ("short_conv", _TAPS),
    "+no_competition": ("competition", "none"),
    "+no_allocation": ("allocation", "none"),
}
#: Flow-Attention without one of its two parts.
ABLATIONS = ("flow+no_competition", "flow+no_allocation")
#: Gates that do not read the tokens, of the --user-dir recipes/wikitext103/gate_variants.
GATES = ("fixed", "learned")
NO_POSITIONS = "+no_positions"
#: Explanations of all additions, for below tables.
_NOTES = {
    "+forget": "gates of each head, read from the tokens, by which its sums forget; ours, in none of the papers",
    "+forget_channel": "the same with a gate for each channel of the keys",
    "+short_conv": f"a causal convolution of {_TAPS} taps in front of q, k and v; ours, in none of the papers",
    "+no_competition": "Flow-Attention without its competition, an ablation of the paper",
    "+no_allocation": "Flow-Attention without its allocation, an ablation of the paper",
    "+fixed": "gates of each head that stay as they are at first: 32 to 1,024 tokens are remembered",
    "+learned": "gates of each head that are learned, the same for every token",
    NO_POSITIONS: "tokens have no positions; their order is in the sums alone",
}
#: A text of fewer bytes is read in characters: it has too few words, whose embeddings would be most parameters.
_WORDS_FROM_BYTES = 20_000_000


# Names.


def mechanism_of(name: str) -> str:
    """The mechanism's name, without additions."""
    return name.partition("+")[0]


def with_additions(mechanism: str) -> list[str]:
    """The mechanism's name alone, and with every addition and pair of additions that it supports when causal."""
    supported = options_of(mechanism, True).described()
    gates, convolutions = (
        [""] + [x for x, (option, _) in _ADDITIONS.items() if option == kind and option in supported]
        for kind in ("forget", "short_conv")
    )
    return [mechanism + gate + convolution for gate, convolution in product(gates, convolutions)]


def names() -> list[str]:
    """Every causal mechanism, then with our additions."""
    causal = list(supporting("causal"))
    return causal + [name for mechanism in causal for name in with_additions(mechanism)[1:]]


def all_names() -> list[str]:
    """``names()``, ablations, models with gates that do not read the tokens, and all of these without positions."""
    plain = [*names(), *ABLATIONS, *(f"{name}+{gates}" for name in ("linear", "flow") for gates in GATES)]
    return plain + [name + NO_POSITIONS for name in plain]


def default_names() -> list[str]:
    """Softmax attention, every mechanism whose state is constant, and two of them with our additions."""
    plain = [name for name in names() if "+" not in name and state_is_constant(name)]
    return ["softmax", *plain, *(x + y for x in ("flow", "linear") for y in ("+forget", "+short_conv"))]


def state_is_constant(name: str) -> bool:
    """Whether the decoding state of a model has the same size after any number of tokens."""
    return bool(ATTENTIONS[mechanism_of(name)].linear_cost)


def notes(models: Iterable[str]) -> list[str]:
    """A note for each addition of ``models``, for below a table; what follows a / in a name is not read."""
    used = {f"+{addition}" for name in models for addition in name.partition("/")[0].split("+")[1:]}
    return [f"{addition}: {note}" for addition, note in _NOTES.items() if addition in used]


# Arguments of fairseq-train.


def option_prefix(architecture: str) -> str:
    """The prefix of the options of an architecture's mechanism, such as ``--linear-``."""
    return f"--{ARCH_MODEL_REGISTRY[architecture].option_prefix}-".replace("_", "-")


def addition_arguments(name: str, prefix: str) -> list[object]:
    """The additions of a name that ``with_additions`` gives, as options that begin with ``prefix``."""
    settings = [_ADDITIONS[f"+{addition}"] for addition in name.split("+")[1:]]
    return [word for option, value in settings for word in (prefix + option.replace("_", "-"), value)]


def attention_arguments(name: str, tokens_per_sample: int) -> list[object]:
    """The architecture of a model; its window or chunk, where it has one, is a quarter of a sequence."""
    mechanism, plain = mechanism_of(name), name.removesuffix(NO_POSITIONS)
    without_positions = ["--no-token-positional-embeddings"] if name.endswith(NO_POSITIONS) else []
    gates = next((gates for gates in GATES if f"+{gates}" in name), None)
    if gates:
        architecture = [f"{mechanism}_gate_variant", f"--{mechanism}-forget", "head", "--gates", gates]
        return ["--user-dir", "recipes/wikitext103/gate_variants", "--arch", *architecture, *without_positions]
    architecture = {"flow": "flowformer_lm"}.get(mechanism, f"{mechanism}_lm")
    prefix, described = option_prefix(architecture), ATTENTIONS[mechanism].Options.described()
    reaches = [x for x in ("window", "chunk_size") if x in described and not described[x].speed_only]
    sizes = [word for x in reaches for word in (prefix + x.replace("_", "-"), max(1, tokens_per_sample // 4))]
    return ["--arch", architecture, *sizes, *addition_arguments(plain, prefix), *without_positions]


def model_arguments(options: argparse.Namespace, name: str) -> list[object]:
    """The arguments that define a model of the size in ``options``, as ``parser`` has them."""
    return [
        *("--task", "language_modeling", *attention_arguments(name, options.tokens_per_sample)),
        *("--decoder-layers", options.layers, "--decoder-attention-heads", options.heads),
        *("--decoder-embed-dim", options.width, "--decoder-ffn-embed-dim", 4 * options.width),
        *("--decoder-input-dim", options.width, "--decoder-output-dim", options.width),
        # A short training repeats little, so it needs no dropout.
        *("--share-decoder-input-output-embed", "--dropout", "0.0", "--tokens-per-sample", options.tokens_per_sample),
    ]


def budget_arguments(options: argparse.Namespace, seed: int, evaluations: int = 8) -> list[object]:
    """The optimiser, the updates of ``options``, and checkpoints after each evaluation."""
    interval = max(1, options.updates // min(evaluations, options.updates))
    return [
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0", "--lr", options.lr),
        *("--max-update", options.updates, "--seed", seed),
        *(*runs.evaluated_every(interval), "--log-interval", max(1, interval // 4)),
    ]


def command(
    options: argparse.Namespace, data: Path, model: Sequence[object], seed: int, evaluations: int = 8
) -> list[object]:
    """Python's arguments that train a model of ``model_arguments`` or others; fairseq reads valid, then test."""
    return runs.fairseq(
        *("train", data, *model, *budget_arguments(options, seed, evaluations)),
        *("--weight-decay", "0.01", "--lr-scheduler", "cosine", "--warmup-updates", max(1, options.updates // 16)),
        *("--sample-break-mode", "none", "--max-tokens", options.batch_tokens),
        *("--valid-subset", "valid,test", *shlex.split(options.more)),  # the first one selects
    )


def parser(about: str, out: str, models: Sequence[str] = (), **defaults: object) -> argparse.ArgumentParser:
    """A parser with the text, the size and the budget of language models; ``models`` and ``defaults`` are defaults."""
    made = runs.parser(about, out)
    made.add_argument("--file", type=Path, help="any text, or a folder with wiki.{train,valid,test}.tokens")
    unit = made.add_mutually_exclusive_group()
    unit.add_argument("--characters", action="store_true", help="a token is a character: if the text is small")
    unit.add_argument("--words", action="store_true", help=f"a word: from {_WORDS_FROM_BYTES:,} bytes on")
    unit.add_argument("--subwords", type=int, metavar="N", help="N subwords, learned from the train part")
    made.add_argument("--limit", type=int, metavar="LINES", help="only the first lines of the text")
    made.add_argument("--models", nargs="+", metavar="NAME", default=list(models), help="see the README")
    sizes = {"updates": 1_600, "batch_tokens": 2048, "tokens_per_sample": 256, "width": 128, "layers": 2, "heads": 4}
    for name, default in sizes.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="of every model")
    made.add_argument("--lr", type=float, default=3e-3, help="highest learning rate, of all models")
    made.add_argument("--more", default="", metavar="ARGUMENTS", help='of fairseq-train, as in --more="--dropout 0.1"')
    made.set_defaults(**defaults)
    return made


def parsed(
    made: argparse.ArgumentParser, arguments: Sequence[str] | None, allowed: Sequence[str]
) -> argparse.Namespace:
    """The options of ``parser``, checked; few lines and updates with --quick."""
    options = made.parse_args(arguments)
    if unknown := [name for name in options.models if name not in allowed]:
        made.error(
            f"--models has {', '.join(unknown)}; allowed: {', '.join(allowed)}, and yours in files that "
            "LINEARTIME_MECHANISMS names"
        )
    if options.quick:
        options.updates, options.limit = min(8, options.updates), options.limit or 400
    if options.tokens_per_sample > options.batch_tokens:
        made.error(
            f"--tokens-per-sample is {options.tokens_per_sample}; allowed: at most {options.batch_tokens}, the tokens "
            "of a batch"
        )
    return options


# Texts and trainings.


def text(options: argparse.Namespace) -> tuple[Path, dict[str, int], str]:
    """The text of ``parser``'s options as data: its folder, the tokens of each split, and what they are."""
    if options.file is None or not options.file.exists():
        raise SystemExit(
            f"--file is {options.file}; allowed: a text file, or a folder with wiki.train.tokens and so on"
        )
    small = options.file.is_file() and options.file.stat().st_size < _WORDS_FROM_BYTES
    unit = "characters" if options.characters or (small and not options.words) else "words"
    unit = f"subwords:{options.subwords}" if options.subwords else unit
    tokens = texts.text_data(options.file, options.out, unit, options.limit)
    return options.out / "data-bin", tokens, unit.partition(":")[0]


def read(folder: Path) -> dict[str, object]:
    """Test perplexity and bits per token of the checkpoint best on valid, the curve, and the cost of a training."""
    logged = runs.points(folder / "train.log")
    valid, test = (logged[logged.split == split].set_index("num_updates") for split in ("valid", "test"))
    best = valid.ppl.idxmin()
    return {
        "parameters": runs.parameters(folder / "train.log"),
        # Perplexity has two digits, bits have three.
        **{"perplexity": test.ppl[best], "bits": test.loss[best], "update": int(best)},
        "curve": [[int(update), value] for update, value in valid.ppl.sort_index().items()],
        # One of four intervals contains an evaluation, which the median ignores.
        "tokens_per_second": logged[logged.split == "train_inner"].wps.median(),
        "seconds": logged.wall.max(),
    }


def dictionary_of(symbols: int) -> Dictionary:
    """A dictionary with so many symbols, those of fairseq included."""
    made = Dictionary()
    for i in range(symbols - len(made)):
        made.add_symbol(f"w{i}")
    return made


def build(arguments: Sequence[object], dictionary: Dictionary) -> nn.Module:
    """The model that fairseq-train builds with ``arguments``, for the symbols of ``dictionary``."""
    options = model_options(["data", *arguments])
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return tasks.FairseqTask.build_model(task, options)


def model_options(words: Iterable[object]) -> argparse.Namespace:
    """The options from which fairseq-train builds its task and its model.

    It fills in the model's defaults with hydra, which takes many times as long and gives the same values.
    """
    given = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [str(word) for word in words])
    declared = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[given.arch])
    return given if declared is None else argparse.Namespace(**{**vars(declared()), **vars(given)})
