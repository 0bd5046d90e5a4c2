"""The text half: the standard library learned through fairseq's own command line, by four models of one shape."""

from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from common.output_files import new_folder

from ..shared import fairseq_log
from ..shared.commands import Finished, python_command, run, shown_path
from ..shared.comparison import NO_READER
from ..shared.fairseq_log import Evaluation, Point
from ..shared.fairseq_training import train
from ..shared.subwords import write_dictionary
from ..shared.working_folder import write_text
from . import corpus

COMMAND = "recipes.demo"


class Budget(NamedTuple):
    """How long the models train and on how much data; the same for every model."""

    updates: int
    train_bytes: int
    lengths: list[int]  # of the extra speed table
    epochs: int  # over the digits


FULL = Budget(updates=128, train_bytes=1_250_000, lengths=[512, 2048, 8192], epochs=30)
#: To see that everything runs; nothing is learned.
QUICK = Budget(updates=10, train_bytes=200_000, lengths=[512], epochs=1)

#: Architecture -> its attention. All have the same shape; gates and norms of an attention come on top. The fair peer of
#: Flowformer is torch's fused kernel.
ARCHITECTURES = {
    "flowformer_lm": "Flow-Attention",
    "softmax_lm": "softmax, torch's fused kernel",
    "transformer_lm": "softmax, fairseq's own",
    "gated_delta_lm": "Gated DeltaNet, a constant state that forgets",
}
#: Options of an architecture besides ``SHAPE``.
OPTIONS = {"gated_delta_lm": ["--gated-delta-short-conv", "4"]}  # as its paper has it

TOKENS_PER_SAMPLE = 2048
VOCABULARY = 4000
#: Options for the shape of the models, for fairseq-train and for the speed table. ``--decoder-normalize-before`` is for
#: transformer_lm, whose default is post-norm. Embeddings have width 512, fairseq's default, and are projected to 256.
SHAPE = [
    *"--decoder-embed-dim 256 --decoder-input-dim 512 --decoder-output-dim 512 --decoder-ffn-embed-dim 1024".split(),
    *"--decoder-layers 3 --decoder-attention-heads 4 --decoder-normalize-before".split(),
    *"--share-decoder-input-output-embed --dropout 0.1".split(),
]
PROMPTS = ['import os⏎import sys⏎⏎⏎class Reader:⏎    """', "def __init__(self", "    for name in"]
#: Length of a sample, the prompt included.
SAMPLE_TOKENS = 120


class LanguageModel(NamedTuple):
    """One trained and evaluated architecture."""

    architecture: str
    parameters: int
    points: list[Point]
    training: Finished
    evaluation: Evaluation
    bits_per_byte: float
    tokens_per_second: float


class TextResult(NamedTuple):
    """All results of the text half."""

    models: list[LanguageModel]
    files: dict[str, int]  # split -> number of files
    text_bytes: dict[str, int]
    tokens: dict[str, int]
    samples: list[str]  # texts the Flowformer wrote


def prepare(out: Path, budget: Budget) -> TextResult:
    """Write corpus, sentencepiece model and binarised splits to ``out``; returns a result without models."""
    print("Text: the interpreter's own standard library", flush=True)
    documents = tqdm(corpus.read_library(), desc="  reading", unit=" files", leave=False, disable=None)
    splits = corpus.split_by_file(documents, dict(corpus.SPLIT_BYTES, train=budget.train_bytes))
    model = corpus.train_sentencepiece(splits["train"], out / "sentencepiece", VOCABULARY)
    write_dictionary(model, out / "dict.txt")
    files = {name: len(split) for name, split in splits.items()}
    sizes = {name: sum(document.size for document in split) for name, split in splits.items()}
    tokens = {name: corpus.write_split(split, model, out / f"{name}.txt") for name, split in splits.items()}
    for name in ("train", "valid", "test"):
        print(f"  {name:<5}  {files[name]:4d} files  {sizes[name]:9,d} bytes  {tokens[name]:8,d} tokens")
    with new_folder(out / "bin", COMMAND) as new:
        command = python_command(
            *("-m", "fairseq_cli.preprocess", "--only-source", "--srcdict", out / "dict.txt"),
            *("--trainpref", out / "train.txt", "--validpref", out / "valid.txt", "--testpref", out / "test.txt"),
            *("--destdir", new),
        )
        run(command, out / "logs" / "preprocess.log")
    return TextResult([], files, sizes, tokens, [])


def train_model(out: Path, architecture: str, budget: Budget) -> Finished:
    """Train one model with fairseq-train."""
    log = out / "logs" / f"{architecture}.train.log"
    with new_folder(out / architecture, COMMAND) as new:  # in its old one it would go on with an earlier demo's model
        finished, _ = train(train_command(out, architecture, budget, new), log, budget.updates, architecture)
    return finished


def train_command(out: Path, architecture: str, budget: Budget, folder: Path) -> list[str]:
    """fairseq-train, with its checkpoints in ``folder``."""
    every = max(1, budget.updates // 30)
    return python_command(
        *("-m", "fairseq_cli.train", out / "bin", "--user-dir", "fairseq_plugin", "--task", "language_modeling"),
        *(*model_arguments(architecture, TOKENS_PER_SAMPLE), "--sample-break-mode", "none"),
        *("--max-tokens", TOKENS_PER_SAMPLE, *NO_READER),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01", "--clip-norm", "1.0"),
        *("--lr", "0.004", "--lr-scheduler", "polynomial_decay", "--warmup-updates", budget.updates // 5),
        *("--total-num-update", budget.updates, "--max-update", budget.updates),
        *("--validate-interval-updates", max(1, budget.updates // 4), "--no-epoch-checkpoints"),
        *("--log-format", "json", "--log-interval", every, "--seed", "1", "--save-dir", folder),
    )


def model_arguments(architecture: str, length: int) -> list[str]:
    """The arguments of fairseq-train that say how a model for sequences of ``length`` tokens is built."""
    options = OPTIONS.get(architecture, [])
    return ["--arch", architecture, *SHAPE, *options, "--tokens-per-sample", str(length)]


def evaluate(out: Path, architecture: str, expected_tokens: int) -> Evaluation:
    """Run fairseq-eval-lm on the test split.

    Raises:
        ValueError: it did not score every token of the split.
    """
    log = out / "logs" / f"{architecture}.eval.log"
    command = python_command(
        *("-m", "fairseq_cli.eval_lm", out / "bin", "--user-dir", "fairseq_plugin", "--gen-subset", "test"),
        *("--path", out / architecture / "checkpoint_last.pt", "--tokens-per-sample", TOKENS_PER_SAMPLE),
        *("--max-tokens", TOKENS_PER_SAMPLE, "--sample-break-mode", "none"),
    )
    run(command, log)
    evaluation = fairseq_log.parse_evaluation(_lines(log))
    if evaluation.tokens != expected_tokens:
        raise ValueError(f"{shown_path(log)}: {evaluation.tokens} tokens were scored; allowed: all {expected_tokens}")
    return evaluation


def sample(out: Path, architecture: str) -> list[str]:
    """Let the model continue each prompt with fairseq-interactive; returns the texts."""
    prompts = out / "prompts.txt"
    write_text(prompts, "".join(prompt + "\n" for prompt in PROMPTS))
    log = out / "logs" / f"{architecture}.interactive.log"
    command = python_command(
        *("-m", "fairseq_cli.interactive", out / "bin", "--user-dir", "fairseq_plugin", "--task", "language_modeling"),
        *("--path", out / architecture / "checkpoint_last.pt", "--bpe", "sentencepiece"),
        *("--sentencepiece-model", out / "sentencepiece.model", "--input", prompts),
        *"--beam 1 --sampling --sampling-topp 0.9 --temperature 0.7".split(),
        *("--max-len-b", SAMPLE_TOKENS, "--seed", 1),
    )
    run(command, log)
    return [corpus.from_line(line) for line in fairseq_log.parse_samples(_lines(log))]


def run_text(out: Path, budget: Budget) -> TextResult:
    """Run the whole text half in the folder ``out``."""
    result = prepare(out, budget)
    for architecture, meaning in ARCHITECTURES.items():
        print(f"{architecture} ({meaning})", flush=True)
        training = train_model(out, architecture, budget)
        evaluation = evaluate(out, architecture, result.tokens["test"])
        lines = _lines(out / "logs" / f"{architecture}.train.log")
        points = fairseq_log.parse_training(lines)
        model = LanguageModel(
            architecture,
            fairseq_log.parse_parameters(lines),
            points,
            training,
            evaluation,
            fairseq_log.bits_per_byte(evaluation, result.text_bytes["test"]),
            fairseq_log.median_tokens_per_second(points),
        )
        print(
            f"  perplexity {evaluation.perplexity:.1f}, {model.bits_per_byte:.3f} bits per byte,"
            f" {model.tokens_per_second:,.0f} tokens/s in training"
        )
        result.models.append(model)
        if architecture == "flowformer_lm":
            result.samples.extend(sample(out, architecture))
            for text in result.samples:
                print("  ----\n  | " + text.replace("\n", "\n  | "))
    return result


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines()
