"""Helpers of the pixel tests: toy images, a data set of them, the task over it."""

from pathlib import Path

import numpy as np
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch import Tensor

import fairseq_plugin
from fairseq_plugin.data.pixels import FIRST_TOKEN, ImageShape, pixel_dictionary
from recipes.texts import write_split

#: No two sides are equal, so that none can stand for another.
SHAPE = ImageShape(4, 5, 3)
COUNTS = {"train": 43, "valid": 9, "test": 7}


def toy_images(split: str, count: int) -> np.ndarray:
    """Images (N, H, W, C), uint8: ramps from a random corner value, so that there is something to learn."""
    rng = np.random.default_rng(sum(split.encode()))
    ramp = np.arange(SHAPE.length).reshape(SHAPE)
    return (rng.integers(0, 256, (count, 1, 1, 1)) + ramp).astype(np.uint8)


def write_pixels(folder: Path) -> Path:
    """A data set of toy images in ``folder``, token for token as its format is described."""
    folder.mkdir(parents=True, exist_ok=True)
    pixel_dictionary().save(str(folder / "dict.txt"))
    SHAPE.save(folder)
    for split, count in COUNTS.items():
        tokens = toy_images(split, count).reshape(count, -1).astype(np.int32) + FIRST_TOKEN
        write_split(folder, split, tokens, 260)
    return folder


def pixel_task(data: Path, *arguments: str) -> fairseq_plugin.PixelModelingTask:
    """The task that ``fairseq-train DATA --task pixel_modeling ARGUMENTS`` sets up."""
    parser = options.get_training_parser()
    command = [str(data), "--task", "pixel_modeling", "--arch", "flowformer_lm", *arguments]
    if "--tokens-per-sample" not in arguments:
        command += ["--tokens-per-sample", str(SHAPE.length)]
    return tasks.setup_task(convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, command)).task)


def batch(task: fairseq_plugin.PixelModelingTask, split: str, indices: list[int]) -> dict:
    """A batch of a split, as the host's loader makes it."""
    if split not in task.datasets:
        task.load_dataset(split)
    dataset = task.dataset(split)
    return dataset.collater([dataset[index] for index in indices])


def images_of(tokens: Tensor) -> np.ndarray:
    """Tokens (N, T) as images (N, H, W, C), written out."""
    return tokens.numpy().reshape(-1, *SHAPE) - 4


def logits_bits(model: torch.nn.Module, source: Tensor, target: Tensor) -> float:
    """Mean bits of target (N, T) under the model's logits for source (N, T), in float64."""
    with torch.no_grad():
        scores = model.eval()(source)[0].double().log_softmax(-1)
    return -scores.gather(-1, target[..., None]).mean().item() / np.log(2)
