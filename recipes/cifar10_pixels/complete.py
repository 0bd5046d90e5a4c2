"""Fill in the lower half of images from their upper half: ``python -m recipes.cifar10_pixels.complete``.

Draws Figure 4 of *A Dot Product Attention Free Transformer* for any checkpoint of ``--task pixel_modeling``. fairseq's
generator draws the samples, one subpixel after the other, from the decoder's incremental state.
"""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.models import BaseFairseqModel
from matplotlib import pyplot as plt
from torch import Tensor

from fairseq_plugin import PixelModelingTask
from fairseq_plugin.data.pixels import to_images
from fairseq_plugin.loading.checkpoint_config import check_files
from fairseq_plugin.loading.checkpoints import read_training


def load(checkpoint: Path, data: Path) -> tuple[BaseFairseqModel, PixelModelingTask]:
    """A trained model, on the GPU if there is one, and its task with the images of ``data``."""
    state, _ = read_training(checkpoint)
    check_files(state, str(checkpoint), {"data": data})
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    if not isinstance(task, PixelModelingTask):
        raise SystemExit(f"{checkpoint} is of {type(task).__name__}; allowed: one of --task pixel_modeling")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), task


def complete(
    model: BaseFairseqModel, task: PixelModelingTask, targets: Tensor, samples: int, temperature: float = 1.0
) -> Tensor:
    """Images (N, S, H, W, C): ``samples`` completions of the upper half of each of ``targets`` (N, T); O(T) steps."""
    shape = task.image_shape
    known = shape.height // 2 * shape.width * shape.channels
    prefix = targets[:, :known].to(next(model.parameters()).device)
    generator = task.build_generator([model], Namespace(sampling=True, beam=samples, temperature=temperature))
    start = prefix.new_full((len(prefix), 1), task.source_dictionary.eos())
    batch = {"net_input": {"src_tokens": start, "src_lengths": torch.ones_like(start[:, 0])}}
    hypotheses = task.inference_step(generator, [model], batch, prefix_tokens=prefix)
    tokens = [sample["tokens"][:-1] for image in hypotheses for sample in image]  # without the end of a sentence
    return to_images(torch.stack(tokens).cpu(), shape).view(len(targets), samples, *shape)


def draw(originals: np.ndarray, samples: np.ndarray, path: Path) -> None:
    """Write a picture with a row for each image (N, H, W, C): the original, its upper half, and its samples."""
    halves = originals.copy()
    halves[:, originals.shape[1] // 2 :] = 128
    titles = ["original", "upper half", *(f"sample {i + 1}" for i in range(samples.shape[1]))]
    size = (1.1 * len(titles), 1.1 * len(originals) + 0.35)
    figure, grid = plt.subplots(len(originals), len(titles), figsize=size, squeeze=False, layout="constrained")
    for axes_row, original, half, drawn in zip(grid, originals, halves, samples):
        for axes, image in zip(axes_row, (original, half, *drawn)):
            axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.set_axis_off()
    for axes, title in zip(grid[0], titles):
        axes.set_title(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main(arguments: Sequence[str] | None = None) -> None:
    """Complete images and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="of fairseq-train --task pixel_modeling")
    parser.add_argument("--data", type=Path, required=True, metavar="DATA-BIN", help="of recipes.cifar10_pixels.data")
    parser.add_argument("--split", default="test", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("completed.png"), help="a new file; default: %(default)s")
    parser.add_argument("--images", type=int, default=8, help="of the split, from the first (%(default)s)")
    parser.add_argument("--samples", type=int, default=3, help="completions of each image (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="below 1, likelier subpixels (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the samples; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.output.exists():
        parser.error(f"--output is {options.output}, which exists; allowed: a new file")
    torch.manual_seed(options.seed)
    model, task = load(options.checkpoint, options.data)
    task.load_dataset(options.split)
    dataset = task.dataset(options.split)
    if options.images > len(dataset):
        parser.error(f"--images is {options.images}; allowed: at most {len(dataset)}, as {options.split} has")
    targets = torch.stack([dataset[index]["target"] for index in range(options.images)])
    samples = complete(model, task, targets, options.samples, options.temperature)
    draw(to_images(targets, task.image_shape).numpy(), samples.numpy(), options.output)
    print(f"Ready: {options.output}")


if __name__ == "__main__":
    main()
