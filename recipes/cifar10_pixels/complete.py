"""Fill in the lower half of images from their upper half: ``python -m recipes.cifar10_pixels.complete``.

Draws Figure 4 of *A Dot Product Attention Free Transformer* for any checkpoint of ``--task pixel_modeling``. fairseq's
generator draws the samples, one subpixel after the other, from the decoder's incremental state.
"""

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.models import BaseFairseqModel
from torch import Tensor
from tqdm import tqdm

from common.checkpoints import read_checkpoint
from common.command_parser import CommandParser
from common.files.output_files import check_new
from fairseq_plugin import PixelModelingTask
from fairseq_plugin.data.pixels import to_images
from fairseq_plugin.loading.checkpoint_config import check_configuration, check_files
from fairseq_plugin.loading.checkpoints import stored_architecture

from ..shared.commands import shown_path
from ..shared.scripts import positive_int, script
from .picture import Completions, draw


def load(checkpoint: Path, data: Path) -> tuple[BaseFairseqModel, PixelModelingTask]:
    """Load a trained model, on the GPU if there is one, and its task with the images of ``data``.

    Raises:
        ValueError: the checkpoint does not exist, or was trained for another task or image shape.
    """
    if not checkpoint.is_file():
        raise ValueError(f"--checkpoint is {checkpoint}, which is no file; allowed: a checkpoint of fairseq-train")
    state = read_checkpoint(checkpoint)
    stored_architecture(state, str(checkpoint))
    check_configuration(state, str(checkpoint))
    check_files(state, str(checkpoint), {"data": data})
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    if not isinstance(task, PixelModelingTask):
        raise ValueError(f"{checkpoint} is of {type(task).__name__}; allowed: one of --task pixel_modeling")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), task


def read_targets(task: PixelModelingTask, split: str, count: int) -> Tensor:
    """The tokens (N, T) of the first ``count`` images of a split.

    Raises:
        ValueError: the split does not exist or has fewer images.
    """
    try:
        task.load_dataset(split)
    except FileNotFoundError as error:
        raise ValueError(f"--split is {split}: {error}; allowed: a split of --data") from error
    dataset = task.dataset(split)
    if len(dataset) < count:
        raise ValueError(f"--images is {count}; allowed: at most {len(dataset)}, as {split} has")
    return torch.stack([dataset[index]["target"] for index in range(count)])


def complete(
    model: BaseFairseqModel, task: PixelModelingTask, targets: Tensor, samples: int, temperature: float = 1.0
) -> Completions:
    """Complete the upper half of each image of ``targets`` (N, T) ``samples`` times; O(T) steps of the decoder."""
    shape = task.image_shape
    known_rows = shape.height // 2
    prefix = targets[:, : known_rows * shape.width * shape.channels].to(next(model.parameters()).device)
    generator = task.build_generator([model], Namespace(sampling=True, beam=samples, temperature=temperature))
    start = prefix.new_full((len(prefix), 1), task.source_dictionary.eos())
    batch = {"net_input": {"src_tokens": start, "src_lengths": torch.ones_like(start[:, 0])}}
    with _StepBar(model, shape.length):
        hypotheses = task.inference_step(generator, [model], batch, prefix_tokens=prefix)
    tokens = torch.stack(
        [sample["tokens"][:-1] for image in hypotheses for sample in image]
    )  # (N S, T), without the end-of-sentence token
    drawn = to_images(tokens.cpu(), shape).view(len(targets), samples, *shape)
    originals = to_images(targets, shape)
    return Completions(originals.numpy().astype(np.uint8), drawn.numpy().astype(np.uint8), known_rows)


class _StepBar:
    """Progress bar over the decoder's steps; fairseq's generator has none."""

    def __init__(self, model: BaseFairseqModel, steps: int) -> None:
        self.model, self.bar = model, tqdm(total=steps, unit=" subpixels", leave=False, disable=None)

    def __enter__(self) -> None:
        self.hook = self.model.decoder.layers[-1].register_forward_hook(lambda *_: self.bar.update() and None)

    def __exit__(self, *_: object) -> None:
        self.hook.remove()
        self.bar.close()


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.cifar10_pixels.complete", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="of fairseq-train --task pixel_modeling")
    parser.add_argument("--data", type=Path, required=True, metavar="DATA-BIN", help="folder that prepare has written")
    parser.add_argument("--split", default="test", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("completed.png"), help="default: %(default)s")
    parser.add_argument("--images", type=positive_int, default=8, help="of the split, from the first (%(default)s)")
    parser.add_argument("--samples", type=positive_int, default=3, help="completions of each image (%(default)s)")
    parser.add_argument(
        "--temperature", type=_temperature, default=1.0, help="below 1, likelier subpixels; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the samples; default: %(default)s")
    return parser


def _temperature(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}; allowed: above 0")
    return value


@script("complete")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    check_new(options.output, "--output")
    torch.manual_seed(options.seed)
    model, task = load(options.checkpoint, options.data)
    targets = read_targets(task, options.split, options.images)
    completions = complete(model, task, targets, options.samples, options.temperature)
    draw(completions, options.output)
    print(f"Ready: {shown_path(options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
