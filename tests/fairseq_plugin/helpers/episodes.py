"""Toy episodes, whose action is a function of the state and of the return that is to come, and models of them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from fairseq import tasks
from torch import Tensor, nn

from fairseq_plugin.data.episode_folder import Episode, EpisodeDescription, write_folder

from .commands import USER_DIR
from .language_models import awake
from .masked_models import randomised
from .series import SHORT, configuration

STATE, ACTION, LONGEST = 3, 2, 12
TASK = ["--task", "offline_rl", "--criterion", "action_mse"]
SIZES = {"decoder_layers": 1, "decoder_embed_dim": 16, "decoder_attention_heads": 2}


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


def described(**changes) -> EpisodeDescription:
    """The description of episodes whose statistics change nothing."""
    values = {"mean": [0.0] * STATE, "std": [1.0] * STATE, "low": [-1.0] * ACTION, "high": [1.0] * ACTION}
    values |= {"longest": LONGEST, "lowest": 0.0, "average": 5.0, "highest": 10.0}
    return EpisodeDescription("toy", "", **{**values, **changes})


def build_decision(
    arch: str, context: int | None = None, length: int = LONGEST, std: float = 0.5, **options
) -> nn.Module:
    """A tiny model in evaluation mode, without dropout, with weights N(0, std) that let attention show."""
    config = configuration(arch)
    short = {name: value for name in config for ending, value in SHORT.items() if name.endswith(ending)}
    tiny = {**SIZES, **short, "dropout": 0.0}
    config = configuration(arch, **{name: tiny[name] for name in tiny if name in config} | options)
    torch.manual_seed(1)
    task = SimpleNamespace(description=described(), context=context, max_episode_length=length)
    return randomised(awake(tasks.FairseqTask.build_model(task, config)), std).eval()


def window(batch: int, steps: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A random window as the model reads it, of the first steps of an episode."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"returns": 1, "states": STATE, "actions": ACTION}
    made = {name: torch.randn(batch, steps, size, generator=generator, dtype=dtype) for name, size in sizes.items()}
    return {**made, "timesteps": torch.arange(steps).expand(batch, steps)}


def training_command(data: Path, save_dir: Path, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train`` of eight epochs on the CPU; later ``arguments`` win."""
    sizes = [x for name, value in SIZES.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    command = [str(data), "--user-dir", USER_DIR, *TASK, "--arch", arch, *sizes, "--disable-validation"]
    command += "--context 5 --max-episode-length 20 --return-scale 10 --windows-per-epoch 512 --batch-size 32".split()
    command += "--optimizer adam --weight-decay 0.0001 --lr 0.01 --lr-scheduler fixed --warmup-updates 4".split()
    command += "--clip-norm 0.25 --max-epoch 8 --no-epoch-checkpoints --cpu --seed 1".split()
    command += "--log-format json --log-interval 1".split()
    return [*command, "--save-dir", str(save_dir), *arguments]
