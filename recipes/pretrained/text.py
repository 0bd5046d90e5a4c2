"""The text half: train fairseq's transformer_lm on a text, then our models from its weights and from random ones."""

from pathlib import Path

from common.output_files import new_folder

from ..flash.prepare import Settings, cut_trial, to_data_bin
from ..shared import fairseq_log
from ..shared.commands import python_command, shown_path
from ..shared.comparison import NO_READER
from ..shared.fairseq_training import last_validation, train
from .results import COMMAND, RANDOM, STOCK, Half, Outcome

SOURCE, MODELS = "transformer_lm", ("flowformer_lm", "linear_lm")
LENGTH, TOKENS_PER_UPDATE = 512, 4096
#: One shape for all; ``--decoder-normalize-before`` is for transformer_lm, whose default is post-norm.
SHAPE = [
    *("--decoder-embed-dim", 128, "--decoder-input-dim", 128, "--decoder-output-dim", 128),
    *("--decoder-ffn-embed-dim", 512, "--decoder-layers", 2, "--decoder-attention-heads", 4),
    *("--decoder-normalize-before", "--share-decoder-input-output-embed", "--dropout", 0.1),
]
_LOG_POINTS = 20


def train_command(data: Path, folder: Path, architecture: str, updates: int, lr: float, *more: object) -> list[str]:
    """fairseq-train with one validation, at the end."""
    return python_command(
        *("-m", "fairseq_cli.train", data, "--user-dir", "fairseq_plugin", "--task", "language_modeling"),
        *("--arch", architecture, *SHAPE, "--tokens-per-sample", LENGTH, "--sample-break-mode", "none"),
        *("--max-tokens", TOKENS_PER_UPDATE, *NO_READER),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01", "--clip-norm", "1.0"),
        *("--lr", lr, "--lr-scheduler", "polynomial_decay"),
        *("--warmup-updates", max(1, updates // 10), "--total-num-update", updates, "--max-update", updates),
        *("--validate-interval", 1_000_000, "--save-dir", folder, "--seed", 1),
        *("--log-format", "json", "--log-interval", max(1, updates // _LOG_POINTS), *more),
    )


def validation_loss(command: list[str], log: Path, updates: int) -> float:
    """Run fairseq-train; its loss on the valid split after the last update, in bits per token.

    Raises:
        CommandFailed: fairseq-train failed.
        ValueError: its log does not end with a validation.
    """
    _, lines = train(command, log, updates, log.stem)
    return last_validation(fairseq_log.parse_training(lines), log, updates).values["loss"]


def compare_text(out: Path, text: Path, source_updates: int, updates: int, vocabulary: int) -> Half:
    """Train the stock model on ``text``, then ours from its weights and from random ones.

    Raises:
        CommandFailed, ValueError: see the functions above.
    """
    print(f"Text: {shown_path(text)}", flush=True)
    to_data_bin(cut_trial(text, out / "raw", None), out, Settings(vocabulary))
    data, logs, folder = out / "data-bin", out / "logs", out / SOURCE
    with new_folder(folder, COMMAND) as new:  # in its old one fairseq-train would go on with an earlier run's model
        command = train_command(data, new, SOURCE, source_updates, 0.003, "--no-epoch-checkpoints")
        source_loss = validation_loss(command, logs / f"{SOURCE}.log", source_updates)
    outcomes = []
    for model in MODELS:
        for start, flags in ((STOCK, ["--finetune-from-model", folder / "checkpoint_last.pt"]), (RANDOM, [])):
            name = f"{model}.{start.split()[0]}"
            flags = ["--no-save", *flags]
            # An update with a learning rate of 0 changes nothing, so the validation after it is that of the start.
            first = train_command(data, out / name, model, 1, 0.0, *flags)
            before = validation_loss(first, logs / f"{name}.before.log", 1)
            last = train_command(data, out / name, model, updates, 0.003, *flags)
            outcomes.append(Outcome(model, start, before, validation_loss(last, logs / f"{name}.log", updates)))
            print(f"  {model} from {start}: {before:.3f}, after {updates} updates {outcomes[-1].after:.3f}", flush=True)
    title = f"Language models, {text.name}"
    unit = f"bits per token of {vocabulary:,} subwords"
    return Half(title, unit, f"{SOURCE} after {source_updates} updates", source_loss, updates, outcomes)
