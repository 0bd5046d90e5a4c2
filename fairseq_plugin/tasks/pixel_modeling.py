"""Images as sequences of subpixels: ``fairseq-train --user-dir fairseq_plugin --task pixel_modeling``.

*A Dot Product Attention Free Transformer*, the CIFAR-10 experiment: an autoregressive model of the raster scan of an
image. Each image is one sample; the model reads ``</s>`` and all subpixels but the last, and predicts all subpixels.
So an image of T subpixels is T tokens for the model, and fairseq's loss in base 2 is bits per dimension.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data import data_utils
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from torch import Tensor

from ..data.indexed_sums import check_sums
from ..data.pixels import VALUES, ImageShape, pixel_dictionary, to_images, to_tokens
from ..generation.pixel_sequence_generator import build_pixel_generator
from ..loading.known_options import option_field
from ._checks import check_required

# Options of language modeling with which a sample would not be one image: name -> allowed value.
_REQUIRED = {
    "sample_break_mode": "none",
    "shorten_method": "none",
    "output_dictionary_size": -1,
    "self_target": False,
    "past_target": False,
    "add_bos_token": False,
    "pad_to_fixed_bsz": False,
}


@dataclass
class PixelModelingConfig(LanguageModelingConfig):
    """Options of ``language_modeling``, and the augmentation of images in training."""

    tokens_per_sample: int = option_field(
        3072, "height x width x channels of the images, which is a sample; other values are refused"
    )
    pixel_no_flip: bool = option_field(
        False, "never mirror an image; otherwise every second one is, at random, in training"
    )
    pixel_max_shift: int = option_field(
        10,
        "largest shift of an image's values in training: one integer, drawn from -N..N per image, "
        "is added to all its subpixels, which are clipped to 0..255 (the paper: a value in the range [-10, 10], "
        "added or subtracted; one integer for an image is our reading); 0 for none",
    )


@register_task("pixel_modeling", dataclass=PixelModelingConfig)
class PixelModelingTask(LanguageModelingTask):
    """Language modeling of images, which are mirrored and shifted in training only.

    Training, validation, ``fairseq-eval-lm``, ``fairseq-generate`` and files are as for ``language_modeling``.
    """

    def __init__(self, args, dictionary, output_dictionary=None, targets=None) -> None:
        super().__init__(args, dictionary, output_dictionary, targets)
        self.image_shape = _load_shape(args.data)
        self.epoch = 1

    @classmethod
    def setup_task(cls, args, **kwargs) -> "PixelModelingTask":
        """Build the task as fairseq does.

        Raises:
            ValueError: an option with which a sample is not one image, a folder without the shape of its images, a
                dictionary other than that of the 256 values, or ``--tokens-per-sample`` other than an image's length.
        """
        check_required(args, _REQUIRED, "pixel_modeling")
        if not 0 <= args.pixel_max_shift < VALUES:
            raise ValueError(f"--pixel-max-shift is {args.pixel_max_shift}; allowed: 0..{VALUES - 1}")
        length = _load_shape(args.data).length
        if args.tokens_per_sample != length:
            raise ValueError(
                f"--tokens-per-sample is {args.tokens_per_sample} (less by --context-window, if given); allowed: "
                f"{length}, an image of {args.data}, without --context-window"
            )
        task = super().setup_task(args, **kwargs)
        if task.dictionary != pixel_dictionary():
            raise ValueError(f"{args.data}/dict.txt holds other symbols; allowed: 0 to 255 and no more, in this order")
        return task

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Load a split as fairseq does.

        Raises:
            ValueError: a sequence is not as long as an image, or a file has changed since it was prepared.
        """
        folders = utils.split_paths(self.args.data)
        check_sums(Path(folders[(epoch - 1) % len(folders)]) / split, combine)
        super().load_dataset(split, epoch, combine, **kwargs)
        sizes = np.asarray(self.datasets[split].dataset.dataset.sizes)
        wrong = sizes[sizes != self.image_shape.length]
        if len(wrong):
            raise ValueError(
                f"split {split} of {self.args.data} holds sequences of {wrong[0]} tokens; allowed: "
                f"{self.image_shape.length}, as {self.image_shape} has"
            )

    def can_reuse_epoch_itr(self, dataset) -> bool:
        """fairseq's hook: False, so that every epoch draws new batches, also in a resumed training.

        Otherwise fairseq would keep the batches of the epoch in which the process started.
        """
        return False

    def begin_epoch(self, epoch: int, model) -> None:
        """Store the epoch, on which the augmentation depends."""
        super().begin_epoch(epoch, model)
        self.epoch = epoch

    def train_step(self, sample: dict[str, Any], *args, **kwargs):
        """As fairseq's, on augmented images: only training calls this, for any split."""
        return super().train_step(self.augment(sample), *args, **kwargs)

    def augment(self, sample: dict[str, Any]) -> dict[str, Any]:
        """``sample`` with each image randomly mirrored and shifted; seed, epoch and the image's index decide."""
        images = to_images(sample["target"], self.image_shape)  # (B, T) -> (B, H, W, C)
        flips, shifts = self._draw(sample["id"])  # (B,) each
        flips, shifts = (value.to(images.device).view(-1, 1, 1, 1) for value in (flips, shifts))  # (B,) -> (B, 1, 1, 1)
        images = torch.where(flips, images.flip(2), images)
        target = to_tokens((images + shifts).clamp(0, VALUES - 1))  # (B, H, W, C) -> (B, T)
        start = sample["net_input"]["src_tokens"][:, :1]
        net_input = {**sample["net_input"], "src_tokens": torch.cat([start, target[:, :-1]], dim=1)}
        return {**sample, "net_input": net_input, "target": target}

    def _draw(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Which images (B,) are mirrored, and their shifts (B,)."""
        largest, flips, shifts = self.args.pixel_max_shift, [], []
        for index in indices.tolist():
            with data_utils.numpy_seed(self.args.seed, self.epoch, index):
                flips.append(np.random.rand() < 0.5 and not self.args.pixel_no_flip)
                shifts.append(np.random.randint(-largest, largest + 1))
        return torch.tensor(flips), torch.tensor(shifts)

    def eval_lm_dataloader(self, dataset, **options):
        """fairseq's batches for ``fairseq-eval-lm``.

        Raises:
            ValueError: the model has fewer positions than an image has subpixels; fairseq would skip every image.
        """
        positions = options.get("max_positions")
        if positions is not None and positions < self.image_shape.length:
            raise ValueError(
                f"the model has {positions} positions; allowed: at least {self.image_shape.length}, as an image of "
                f"{self.args.data} has subpixels"
            )
        return super().eval_lm_dataloader(dataset, **options)

    def build_generator(self, models, args, seq_gen_cls=None, extra_gen_cls_kwargs=None, **options):
        """fairseq's generator, restricted to whole images of subpixels; ``--max-len-a`` and ``-b`` have no effect."""
        build = partial(
            build_pixel_generator,
            length=self.image_shape.length,
            generator_class=seq_gen_cls or SequenceGenerator,
        )
        return super().build_generator(models, args, build, extra_gen_cls_kwargs, **options)


def _load_shape(data: str) -> ImageShape:
    """The shape of the images in all folders of ``data``, which fairseq separates by colons."""
    if not data:
        raise ValueError("no data folder is given; allowed with --task pixel_modeling: a folder of binarised images")
    shapes = {folder: ImageShape.load(Path(folder)) for folder in utils.split_paths(data)}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"the folders {data} hold images of {shapes}; allowed: images of one shape")
    return next(iter(shapes.values()))
