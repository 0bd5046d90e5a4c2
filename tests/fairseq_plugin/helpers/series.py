"""Toy time series: waves whose frequency is the label, of unequal lengths."""

from pathlib import Path

import numpy as np

from fairseq_plugin.data.series_folder import Description, write_folder

from .commands import USER_DIR

CHANNELS, LIMIT = 3, 27
LABELS = ["slow", "Fast", "none"]


def waves(count: int, seed: int, longest: int = LIMIT) -> tuple[list[np.ndarray], list[str]]:
    """Series (T, CHANNELS) of 6 to ``longest`` steps, at a level far from 0, and their labels."""
    rng = np.random.default_rng(seed)
    series, labels = [], []
    for i in range(count):
        steps = longest if i == 0 else rng.integers(6, longest + 1)
        kind = i % len(LABELS)
        time = np.arange(steps)[:, None] * (0.4, 1.6, 0.0)[kind] + rng.uniform(0, 1, (1, CHANNELS))
        series.append(50.0 + np.array([1.0, 3.0, 9.0]) * (np.sin(time) + 0.1 * rng.normal(size=(steps, CHANNELS))))
        labels.append(LABELS[kind])
    return series, labels


def write_waves(folder: Path, train: int = 48, test: int = 24) -> Description:
    """A prepared folder, whose test series are up to four steps longer than those of training."""
    return write_folder(folder, {"train": waves(train, 1), "test": waves(test, 2, LIMIT + 4)})


def training_command(data: Path, save_dir: Path, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train`` of four epochs on the CPU; later ``arguments`` win."""
    command = "--task time_series_classification --criterion sentence_prediction --encoder-layers 1 "
    command += "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --valid-subset test "
    command += "--optimizer radam --lr 5e-3 --clip-norm 4.0 --batch-size 8 --required-batch-size-multiple 1 "
    command += "--max-epoch 4 --no-epoch-checkpoints --cpu --seed 1 --log-format json --log-interval 1"
    data = [str(data), "--user-dir", USER_DIR, "--arch", arch]
    return [*data, *command.split(), "--save-dir", str(save_dir), *arguments]
