"""Small image models of timm, trained in this process on MNIST's digits or on any folder of images."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.utils import random_seed
from torch import nn

import timm_plugin  # noqa: F401  (registers the models)

from ..shared.experiment import Options, Record, option
from ..shared.image_training import Batches, Images, fit, validate
from ..shared.mnist import DATA_HELP, SIDE, name_of
from .building import timm_arguments

#: The papers' images have 14 x 14 patches, and their windows are for these.
_PUBLISHED_GRID = 14
#: DAFT in DeiT-S's shape: the rank of its position biases is a third of the width; its window.
_BIAS_SHARE, _WINDOW = 3, 11
#: Mechanism -> the option that says how many tokens it treats together; in small a quarter of all.
_REACHES = {"reformer": "chunk_size", "longformer": "window", "nystrom": "landmarks"}
#: Deviation of the positions as first drawn.
_POSITIONS = 1.0


@dataclass(frozen=True, kw_only=True)
class SmallImages(Options):
    """The options of small image models: the images, and the size and the budget of all models."""

    jobs: int = 1
    data_dir: Path | None = option(None, DATA_HELP, setting=False, type=Path, metavar="DIR")
    side: int = option(SIDE, "of the images in pixels (%(default)s)")
    patch: int = option(7, "side of a patch in pixels (%(default)s)")
    stage_patch: int = option(4, "side of a patch of the first of two stages (%(default)s)")
    width: int = option(48)
    layers: int = option(2)
    heads: int = option(8)
    epochs: int = option(12, "of all models (%(default)s)", quick=1)
    batch: int = option(32, "images of an update (%(default)s)")
    lr: float = option(5e-3, "highest learning rate, of all models (%(default)s)")

    def settings(self) -> Record:
        """See ``Options``; with the name of the images."""
        return {"images": name_of(self.data_dir), **super().settings()}


def small_model(model: str, size: SmallImages) -> tuple[str, dict[str, Any]]:
    """A model of timm in the shape of DeiT-S or of Flowformer's Table 5: name and arguments in ``size``."""
    name, kwargs = timm_arguments(model)
    if name.endswith("_hier_s"):  # the paper's last two stages
        return name, _two_stages(name, size) | kwargs
    grid = size.side // size.patch
    small: dict[str, Any] = {"img_size": size.side, "patch_size": size.patch, "embed_dim": size.width}
    if name.startswith("mixer"):
        return name, {**small, "num_blocks": size.layers, "mlp_ratio": (4 * grid**2 / size.width, 4.0), **kwargs}
    small |= {"depth": size.layers, "num_heads": size.width if name == "daft_conv_s" else size.heads}
    if name.startswith("daft_conv"):
        kwargs["window"] = scaled_window(kwargs.get("window", _WINDOW), grid / _PUBLISHED_GRID)
    if name.startswith("daft_full"):
        small["bias_dim"] = size.width // _BIAS_SHARE
    return name, {**small, **kwargs}


def _two_stages(name: str, size: SmallImages) -> dict[str, Any]:
    """Arguments of a hierarchical model of two stages, the second of ``size.width`` and patches of twice the side."""
    patch = size.stage_patch
    stages = {"embed_dims": (size.width // 2, size.width), "depths": (1, size.layers - 1)}
    stages["num_heads"] = (max(1, size.heads // 2), size.heads)
    mechanism, tokens = name.removesuffix("_hier_s"), (size.side // patch) ** 2
    if mechanism in _REACHES:
        stages[_REACHES[mechanism]] = max(1, tokens // 4)
    if mechanism == "soft":
        stages["ratio"] = 2  # a landmark for 2 x 2 tokens
    return {"img_size": size.side, "patch_size": patch, **stages}


def scaled_window(window: int, share: float) -> int:
    """The side of a window on a grid that is ``share`` of the paper's: the nearest odd number."""
    return 2 * int(window * share / 2) + 1


def build(name: str, kwargs: dict[str, Any], images: dict[str, Images], seed: int) -> nn.Module:
    """A model of timm for ``images``, with random weights."""
    random_seed(seed)
    learn = images["train"]
    model = timm.create_model(name, in_chans=learn.pixels.shape[1], num_classes=int(learn.labels.max()) + 1, **kwargs)
    draw_by_width(model)
    return model


def draw_by_width(model: nn.Module) -> None:
    """Draw weights again: linear ones by their width (Xavier), and positions as large as normalised tokens.

    timm draws both with a deviation of 0.02, for hundreds of channels and epochs. With 48 channels the layers then do
    nearly nothing at first, and a short training ends before a model knows where its patches are.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("head"):
            nn.init.xavier_uniform_(module.weight)
    positions = getattr(model, "pos_embed", None)
    if positions is not None:  # a parameter of timm's models, a module of hierarchical ones
        nn.init.normal_(getattr(positions, "weight", positions), std=_POSITIONS)


def train_model(model: nn.Module, images: dict[str, Images], epochs: int, size: SmallImages, title: str) -> Record:
    """Train; returns the ``parameters``, the ``seconds``, and the ``top1`` of the held-out images after the last epoch.

    The held-out images select nothing.
    """
    started = time.monotonic()
    fit(model, images["train"], epochs, size.batch, size.lr, title)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.monotonic() - started
    return {"parameters": parameters, "seconds": seconds, "top1": top1(model, images["validation"])}


def top1(model: nn.Module, images: Images) -> float:
    """Per cent of ``images`` that ``model`` classifies correctly."""
    return validate(model, Batches(images))["top1"]
