"""The text half: fairseq's transformer_lm learns a text, and our language models start from it or from nothing."""

import shutil
from pathlib import Path

from tqdm import tqdm

from .. import fairseq_log
from ..commands import python, run, shown
from ..flash.prepare import Settings, cut_trial, to_data_bin
from .results import RANDOM, STOCK, Half, Outcome

SOURCE, MODELS = "transformer_lm", ("flowformer_lm", "linear_lm")
LENGTH, TOKENS_PER_UPDATE = 512, 4096
#: One shape for all, pre-norm, which is said for transformer_lm.
SHAPE = [
    "--decoder-embed-dim", 128, "--decoder-input-dim", 128, "--decoder-output-dim", 128, "--decoder-ffn-embed-dim", 512,
    "--decoder-layers", 2, "--decoder-attention-heads", 4, "--decoder-normalize-before",
    "--share-decoder-input-output-embed", "--dropout", 0.1,
]  # fmt: skip
_LOG_POINTS = 20


def train_command(data: Path, folder: Path, architecture: str, updates: int, lr: float, *further: object) -> list[str]:
    """fairseq-train with one validation, at the end."""
    return python(
        "-m", "fairseq_cli.train", data, "--user-dir", "fairseq_plugin", "--task", "language_modeling",
        "--arch", architecture, *SHAPE, "--tokens-per-sample", LENGTH, "--sample-break-mode", "none",
        "--max-tokens", TOKENS_PER_UPDATE, "--num-workers", 0, "--optimizer", "adam",
        "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01", "--clip-norm", "1.0", "--lr", lr,
        "--lr-scheduler", "polynomial_decay", "--warmup-updates", max(1, updates // 10),
        "--total-num-update", updates, "--max-update", updates, "--validate-interval", 1_000_000,
        "--save-dir", folder, "--seed", 1, "--log-format", "json",
        "--log-interval", max(1, updates // _LOG_POINTS), *further,
    )  # fmt: skip


def validation_loss(command: list[str], log: Path, updates: int) -> float:
    """Run fairseq-train; its loss on the valid split after the last update, in bits per token.

    Raises:
        CommandFailed: fairseq-train failed.
        ValueError: its log does not end with a validation.
    """
    with tqdm(total=updates, desc=f"  {log.stem}", unit=" updates", leave=False, disable=None) as bar:

        def on_line(line: str) -> None:
            entry = fairseq_log.parse_entry(line)
            if entry is not None:
                bar.update(entry.update - bar.n)

        run(command, log, on_line)
    entries = fairseq_log.parse_training(log.read_text(encoding="utf-8").splitlines())
    if not entries or entries[-1].kind != "valid" or entries[-1].update != updates:
        raise ValueError(f"{shown(log)} does not end with a validation after update {updates}")
    return entries[-1].loss


def compare_text(out: Path, text: Path, source_updates: int, updates: int, vocabulary: int) -> Half:
    """Train the stock model on ``text``, then ours from its weights and from random ones.

    Raises:
        CommandFailed, ValueError: see the functions above.
    """
    print(f"Text: {shown(text)}", flush=True)
    to_data_bin(cut_trial(text, out / "raw", None), out, Settings(vocabulary))
    data, logs, folder = out / "data-bin", out / "logs", out / SOURCE
    shutil.rmtree(folder, ignore_errors=True)  # fairseq-train would go on with an earlier run's model
    command = train_command(data, folder, SOURCE, source_updates, 0.003, "--no-epoch-checkpoints")
    source_loss = validation_loss(command, logs / f"{SOURCE}.log", source_updates)
    outcomes = []
    for model in MODELS:
        for start, flags in ((STOCK, ["--finetune-from-model", folder / "checkpoint_last.pt"]), (RANDOM, [])):
            name = f"{model}.{start.split()[0]}"
            flags = ["--no-save", *flags]
            # An update with a learning rate of 0 changes nothing: the validation after it is of the start.
            first = train_command(data, out / name, model, 1, 0.0, *flags)
            before = validation_loss(first, logs / f"{name}.before.log", 1)
            last = train_command(data, out / name, model, updates, 0.003, *flags)
            outcomes.append(Outcome(model, start, before, validation_loss(last, logs / f"{name}.log", updates)))
            print(f"  {model} from {start}: {before:.3f}, after {updates} updates {outcomes[-1].after:.3f}", flush=True)
    title = f"Language models, {text.name}"
    unit = f"bits per token of {vocabulary:,} subwords"
    return Half(title, unit, f"{SOURCE} after {source_updates} updates", source_loss, updates, outcomes)
