"""Small image models of timm, trained in this process on MNIST's digits or on any folder of images."""

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from timm.utils import random_seed
from torch import nn

import timm_plugin  # noqa: F401  (registers the models)

from ..shared.experiment import Options, Record, option
from ..shared.image_training import Batches, Images, fit, validate
from ..shared.mnist import DATA_HELP, SIDE, identity_of
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

    @functools.cached_property
    def images(self) -> str:
        """The images; see ``identity_of``."""
        return identity_of(self.data_dir)

    def settings(self) -> Record:
        """See ``Options``; with the images."""
        return {"images": self.images, **super().settings()}

    def check_sizes(self, models: Iterable[str]) -> None:
        """Raise ValueError, which names the option, unless timm's ``models`` can be built in these sizes."""
        names = {model.split()[0] for model in models}
        staged = {name for name in names if _is_staged(name)}
        if names - staged:
            check_patches("--side", self.side, "--patch", self.patch)
        if staged:
            check_patches("--side", self.side, "--stage-patch", self.stage_patch)
            for option_name, value in (("--layers", self.layers), ("--width", self.width)):
                if value < 2:
                    raise ValueError(f"{option_name} is {value}; allowed: at least 2, for models of two stages")
        shapes = list(zip(*_stages(self))) if staged else []
        if any(map(_has_heads, names - staged)):
            shapes.append((self.width, self.heads))
        if any(width % heads for width, heads in shapes):
            halves = ", and half of it one of half the width, in models of two stages" if staged else ""
            raise ValueError(f"--heads is {self.heads}; allowed: a divisor of --width {self.width}{halves}")


def check_patches(option_name: str, side: int, patch_name: str, patch: int) -> None:
    """Raise ValueError unless the side of an image, the value of an option, is whole patches."""
    if side % patch:
        raise ValueError(f"{option_name} is {side}; allowed: whole patches of {patch_name} {patch}")


def _is_staged(name: str) -> bool:
    """Whether a model of timm is hierarchical."""
    return name.endswith("_hier_s")


def _has_heads(name: str) -> bool:
    """Whether a model of timm that is not hierarchical divides its width among ``--heads``."""
    return name != "daft_conv_s" and not name.startswith("mixer")


def small_model(model: str, size: SmallImages) -> tuple[str, dict[str, Any]]:
    """A model of timm in the shape of DeiT-S or of Flowformer's Table 5: name and arguments in ``size``."""
    name, kwargs = timm_arguments(model)
    if _is_staged(name):  # the paper's last two stages
        return name, _two_stages(name, size) | kwargs
    grid = size.side // size.patch
    small: dict[str, Any] = {"img_size": size.side, "patch_size": size.patch, "embed_dim": size.width}
    if name.startswith("mixer"):
        return name, {**small, "num_blocks": size.layers, "mlp_ratio": (4 * grid**2 / size.width, 4.0), **kwargs}
    small |= {"depth": size.layers, "num_heads": size.heads if _has_heads(name) else size.width}
    if name.startswith("daft_conv"):
        kwargs["window"] = scaled_window(kwargs.get("window", _WINDOW), grid / _PUBLISHED_GRID)
    if name.startswith("daft_full"):
        small["bias_dim"] = max(1, size.width // _BIAS_SHARE)
    return name, {**small, **kwargs}


def _stages(size: SmallImages) -> tuple[tuple[int, int], tuple[int, int]]:
    """The widths of two stages, and their heads."""
    return (size.width // 2, size.width), (max(1, size.heads // 2), size.heads)


def _two_stages(name: str, size: SmallImages) -> dict[str, Any]:
    """Arguments of a hierarchical model of two stages, the second of ``size.width`` and patches of twice the side."""
    patch = size.stage_patch
    widths, heads = _stages(size)
    stages = {"embed_dims": widths, "depths": (1, size.layers - 1), "num_heads": heads}
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
