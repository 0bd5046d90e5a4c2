"""Train gated_delta_lm on the characters of a text by fairseq-train; write the model that the package has.

Run ``python -m recipes.packaged_models.characters --file tinyshakespeare.txt`` from the checkout's root. Run it again
to continue an interrupted training.
"""

import argparse
import re
import sys
from pathlib import Path

from common.command_parser import CommandParser
from common.files.output_files import new_folder
from fairseq_plugin.loading.safetensors_folder import CHECKPOINT, DICTIONARY, write_checkpoint
from fairseq_plugin.to_safetensors import write_folder

from ..shared import fairseq_log
from ..shared.characters import spell
from ..shared.commands import python_command, run
from ..shared.comparison import NO_READER
from ..shared.corpus import to_line
from ..shared.download import file_sha256
from ..shared.fairseq_log import Evaluation
from ..shared.fairseq_training import train
from ..shared.scripts import positive_int, script
from ..shared.settings import keep_settings
from ..shared.split_text import preprocess
from ..shared.text_files import cut_trial, write_lines
from ..shared.working_folder import working_folder

COMMAND = "recipes.packaged_models.characters"
#: The folders that are replaced as wholes.
WHOLE = dict.fromkeys(("data-bin", "model", "checkpoint"), COMMAND)
ARCHITECTURE = "gated_delta_lm"
SEED = 1
#: Characters of a sample in training and evaluation; a generated text may be longer.
TOKENS_PER_SAMPLE = 256
_BATCH_TOKENS = 2048
_LONGEST_TEXT = 4096


def read_splits(file: Path) -> dict[str, list[str]]:
    """The paragraphs of a text, such as the speeches of a play, as lines of characters for train, valid and test.

    Paragraphs are what empty lines separate; the ends of lines within one become "⏎". Splits are consecutive.

    Raises:
        ValueError: the file does not exist, is not text in UTF-8, has too few paragraphs, or a mark such as "⏎".
    """
    if not file.is_file():
        raise ValueError(f"--file is {file}, which is no file; allowed: a text")
    try:
        text = file.read_text(encoding="utf-8")
        paragraphs = [spell(to_line(paragraph) + "\n") for paragraph in re.split(r"\n{2,}", text.strip("\n"))]
    except ValueError as error:  # includes UnicodeDecodeError
        raise ValueError(f"--file is {file}: {error}; allowed: a text in UTF-8 without marks") from error
    parts = cut_trial(len(paragraphs), f"--file is {file} of {len(paragraphs)} paragraphs")
    return {split: paragraphs[indices.start : indices.stop] for split, indices in parts.items()}


def train_arguments(data: Path, folder: Path, updates: int) -> list[object]:
    """The arguments of fairseq-train for the model that the package has, with its checkpoints in ``folder``."""
    return [
        *(data, "--user-dir", "fairseq_plugin", "--task", "language_modeling", "--arch", ARCHITECTURE),
        *"--gated-delta-short-conv 4 --no-token-positional-embeddings --decoder-layers 3".split(),
        *"--decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128".split(),
        *"--decoder-ffn-embed-dim 512 --decoder-attention-heads 4 --share-decoder-input-output-embed".split(),
        *("--dropout", 0.1, "--bpe", "lineartime_characters", "--max-target-positions", _LONGEST_TEXT),
        *("--tokens-per-sample", TOKENS_PER_SAMPLE, "--sample-break-mode", "none", "--max-tokens", _BATCH_TOKENS),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", 0.1, "--clip-norm", 1.0),
        *("--lr", 0.004, "--lr-scheduler", "cosine", "--warmup-updates", max(1, updates // 16)),
        *("--max-update", updates, "--seed", SEED, "--cpu", *NO_READER),
        *("--validate-interval-updates", 250, "--save-interval-updates", 250, "--keep-interval-updates", 1),
        *"--no-epoch-checkpoints --log-format json --log-interval 20".split(),
        *("--save-dir", folder),
    ]


def evaluate(out: Path) -> Evaluation:
    """The result of fairseq-eval-lm on the test split, for the weights in half precision."""
    log = out / "logs" / "evaluation.log"
    command = python_command(
        *("-m", "fairseq_cli.eval_lm", out / "data-bin", "--user-dir", "fairseq_plugin", "--gen-subset", "test"),
        *("--path", out / "checkpoint" / CHECKPOINT, "--sample-break-mode", "none", "--cpu"),
        *("--tokens-per-sample", TOKENS_PER_SAMPLE, "--max-tokens", _BATCH_TOKENS),
    )
    run(command, log)
    return fairseq_log.parse_evaluation(log.read_text(encoding="utf-8").splitlines())


def parser() -> CommandParser:
    """The options of the command."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    out = Path("work/packaged_characters")
    parser.add_argument("--file", type=Path, required=True, help="a text in UTF-8, with empty lines between paragraphs")
    parser.add_argument("--out", type=Path, default=out, help="folder for everything (default: %(default)s)")
    parser.add_argument("--updates", type=positive_int, default=2000, help="of the training (default: %(default)s)")
    return parser


@script("packaged_models.characters")
def main(arguments: list[str] | None = None) -> int:
    """Train, write the model, and evaluate it; returns 0."""
    options = parser().parse_args(arguments)
    with working_folder(options.out.absolute(), COMMAND, whole=WHOLE):
        return _run(options, options.out.absolute())


def _run(options: argparse.Namespace, out: Path) -> int:
    splits = read_splits(options.file)
    sizes = {split: len(lines) for split, lines in splits.items()}
    text = {"file": options.file.name, "text_sha256": file_sha256(options.file), **sizes}
    keep_settings(out / "settings.json", {**text, "updates": options.updates})
    if not (out / "data-bin").exists():
        texts = {split: out / "text" / f"{split}.txt" for split in splits}
        for split, lines in splits.items():
            write_lines(texts[split], lines)
        preprocess(texts, out / "data-bin", COMMAND, out / "logs" / "preprocess.log", "--workers", 1)
    checkpoints = out / "training"
    command = python_command(
        "-m", "fairseq_cli.train", *train_arguments(out / "data-bin", checkpoints, options.updates)
    )
    train(command, out / "logs" / "train.log", options.updates, ARCHITECTURE, append=True)
    with new_folder(out / "model", COMMAND) as unfinished:
        dictionary = out / "data-bin" / DICTIONARY
        write_folder(checkpoints / "checkpoint_last.pt", dictionary, unfinished, half=True)
    with new_folder(out / "checkpoint", COMMAND) as unfinished:
        write_checkpoint(out / "model", unfinished)
    evaluation = evaluate(out)
    print(f"{out / 'model'}: perplexity {evaluation.perplexity:.3f} of {evaluation.tokens:,} test characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
