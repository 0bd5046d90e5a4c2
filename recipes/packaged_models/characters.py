"""Train gated_delta_lm on the characters of a text by fairseq-train; write the model that the package has.

Run ``python -m recipes.packaged_models.characters --file tinyshakespeare.txt`` from the checkout's root. Run it again
to continue an interrupted training.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from fairseq_plugin.loading.safetensors_folder import CHECKPOINT, DICTIONARY, write_checkpoint
from fairseq_plugin.to_safetensors import write_folder

from .. import library, runs, texts


def read_splits(file: Path) -> dict[str, list[str]]:
    """The paragraphs of a text, such as the speeches of a play, as lines of characters for train, valid and test.

    Paragraphs are what empty lines separate; the ends of lines within one become "⏎". Splits are consecutive.
    """
    try:
        text = file.read_text(encoding="utf-8").strip("\n")
        paragraphs = [texts.spell(library.to_line(paragraph) + "\n") for paragraph in re.split(r"\n{2,}", text)]
    except (OSError, ValueError) as error:  # includes UnicodeDecodeError
        raise SystemExit(f"--file is {file}: {error}; allowed: a text in UTF-8 without marks") from error
    return {
        split: [paragraphs[i] for i in part]
        for split, part in texts.cut(len(paragraphs), f"{file}'s paragraphs").items()
    }


def train_command(data: Path, updates: int) -> list[object]:
    """Python's arguments that train the model that the package has."""
    return runs.fairseq(
        *("train", data, "--task", "language_modeling", "--required-batch-size-multiple", 8),
        *"--arch gated_delta_lm --gated-delta-short-conv 4 --no-token-positional-embeddings --decoder-layers 3".split(),
        *"--decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128".split(),
        *"--decoder-ffn-embed-dim 512 --decoder-attention-heads 4 --share-decoder-input-output-embed".split(),
        *"--dropout 0.1 --bpe lineartime_characters --max-target-positions 4096".split(),
        *"--tokens-per-sample 256 --sample-break-mode none --max-tokens 2048".split(),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", 0.1, "--clip-norm", 1.0),
        *("--lr", 0.004, "--lr-scheduler", "cosine", "--warmup-updates", max(1, updates // 16)),
        *("--max-update", updates, "--seed", 1, "--cpu"),
        *("--validate-interval-updates", 250, "--save-interval-updates", 250, "--keep-interval-updates", 1),
        *"--no-epoch-checkpoints --log-interval 20".split(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write the model, and evaluate it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="a text in UTF-8, with empty lines between paragraphs")
    parser.add_argument("--out", type=Path, default=Path("work/packaged_characters"), help="default: %(default)s")
    parser.add_argument("--updates", type=int, default=2000, help="of the training (default: %(default)s)")
    options = parser.parse_args(arguments)
    splits = read_splits(options.file)
    out, sizes = options.out, {split: len(lines) for split, lines in splits.items()}
    runs.begin(out, [options.file.absolute(), *sizes.values(), options.updates])
    paths = {split: out / "text" / f"{split}.txt" for split in splits}
    if not (out / "data-bin").exists():
        for split, lines in splits.items():
            texts.write_lines(paths[split], lines)
    texts.preprocess(paths, out / "data-bin", "--workers", 1)
    run = runs.Run("gated_delta_lm", 1, train_command(out / "data-bin", options.updates))
    runs.train_all([run], out, 1, lambda folder: {})
    if not (out / "model").exists():
        (out / "model").mkdir()
        last = out / "runs" / "gated_delta_lm.1" / "checkpoints" / "checkpoint_last.pt"
        write_folder(last, out / "data-bin" / DICTIONARY, out / "model", half=True)
    if not (out / "checkpoint").exists():
        (out / "checkpoint").mkdir()
        write_checkpoint(out / "model", out / "checkpoint")
    log = out / "evaluation.log"
    runs.run(
        [
            *("-m", "fairseq_cli.eval_lm", out / "data-bin", "--user-dir", "fairseq_plugin", "--gen-subset", "test"),
            *("--path", out / "checkpoint" / CHECKPOINT, "--sample-break-mode", "none", "--cpu"),
            *("--tokens-per-sample", 256, "--max-tokens", 2048),
        ],
        log,
    )
    (line,) = [line for line in log.read_text(encoding="utf-8").splitlines() if "Perplexity" in line][-1:]
    print(f"{out / 'model'}: {line.partition('| ')[2] or line}")


if __name__ == "__main__":
    main()
