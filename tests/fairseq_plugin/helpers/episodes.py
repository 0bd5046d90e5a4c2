"""Toy episodes, whose action is a function of the state and of the return that is to come."""

from pathlib import Path

import numpy as np

from fairseq_plugin.data.episode_folder import Episode, EpisodeDescription, write_folder

from .commands import USER_DIR

STATE, ACTION, LONGEST = 3, 2, 12


def episodes(count: int, seed: int = 1) -> list[Episode]:
    """Episodes of 4 to ``LONGEST`` steps; every second one has rewards of 1 and actions of another sign."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        steps = LONGEST if i == 0 else int(rng.integers(4, LONGEST + 1))
        states = 5.0 + 2.0 * rng.normal(size=(steps, STATE))
        good = i % 2
        actions = np.tanh(states[:, :ACTION] - 5.0) * (1.0 if good else -1.0)
        made.append(Episode(states, actions, np.full(steps, float(good))))
    return made


def write_episodes(folder: Path, count: int = 24) -> EpisodeDescription:
    """A folder of toy episodes, for training alone."""
    return write_folder(folder, {"train": episodes(count)}, "toy", "Toy-v0")


def training_command(data: Path, save_dir: Path, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train`` of eight epochs on the CPU; later ``arguments`` win."""
    command = "--task offline_rl --criterion action_mse --decoder-layers 1 --decoder-embed-dim 16 "
    command += "" if arch in ("bc_decision", "awac_decision") else "--decoder-attention-heads 2 "
    command += "--disable-validation --context 5 --max-episode-length 20 --return-scale 10 --windows-per-epoch 512 "
    command += "--batch-size 32 --optimizer adam --weight-decay 0.0001 --lr 0.01 --lr-scheduler fixed "
    command += "--warmup-updates 4 --clip-norm 0.25 --max-epoch 8 --no-epoch-checkpoints --cpu --seed 1 "
    command += "--log-format json --log-interval 1"
    data = [str(data), "--user-dir", USER_DIR, "--arch", arch]
    return [*data, *command.split(), "--save-dir", str(save_dir), *arguments]
