"""Toy time series: waves whose frequency is the label, of unequal lengths, and models that read them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from fairseq import tasks
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_plugin.data.series_folder import Description, write_folder

from .commands import USER_DIR
from .language_models import awake

CHANNELS, LIMIT = 3, 27
LABELS = ["slow", "Fast", "none"]
TASK = ["--task", "time_series_classification", "--criterion", "sentence_prediction"]
SIZES = {"encoder_layers": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32, "encoder_attention_heads": 2}
#: Where a model has an option that ends so, this value lets toy series cross several chunks, rows and windows.
SHORT = {"chunk_size": 8, "row_length": 4, "conv_window": 5, "bias_dim": 4, "flash_query_dim": 8}


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


def configuration(arch: str, **options):
    """The configuration of an architecture as fairseq makes it, with ``options`` in place of its defaults."""
    config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[arch](**options))
    OmegaConf.set_struct(config, False)
    config._name = arch
    return config


def build_classifier(arch: str, **options) -> nn.Module:
    """A tiny model in evaluation mode, without dropout, with a head for three labels."""
    known = MODEL_DATACLASS_REGISTRY[arch].__dataclass_fields__
    short = {name: value for name in known for ending, value in SHORT.items() if name.endswith(ending)}
    tiny = {**SIZES, **short, "dropout": 0.0, "activation_dropout": 0.0}
    config = configuration(arch, **{name: tiny[name] for name in tiny if name in known} | options)
    described = Description(LABELS, [0.0] * CHANNELS, [1.0] * CHANNELS, LIMIT)
    torch.manual_seed(1)
    model = tasks.FairseqTask.build_model(SimpleNamespace(description=described, max_length=LIMIT), config)
    model.register_classification_head("toy", len(LABELS))
    return awake(model).eval()


def scores(model: nn.Module, source: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """The scores (B, classes) of source (B, T, CHANNELS)."""
    return model(source, padding_mask, classification_head_name="toy")[0]


def training_command(data: Path, save_dir: Path, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train`` of four epochs on the CPU; later ``arguments`` win."""
    sizes = [x for name, value in SIZES.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    command = [str(data), "--user-dir", USER_DIR, *TASK, "--arch", arch, *sizes, "--valid-subset", "test"]
    command += "--optimizer radam --lr 5e-3 --clip-norm 4.0 --batch-size 8 --required-batch-size-multiple 1".split()
    command += "--max-epoch 4 --no-epoch-checkpoints --cpu --seed 1 --log-format json --log-interval 1".split()
    return [*command, "--save-dir", str(save_dir), *arguments]
