"""The arrays that the pictures show: the position biases of a model, and its keys for an image."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn

from common.attention import DaftConvAttention, DaftFullAttention, record_keys

from .checkpoints import Loaded


class Bias(NamedTuple):
    """exp(w) - 1 of one layer: the relative change of a token's weight by its position."""

    #: DAFT-full (T, T), NaN for tokens that a causal model does not see; DAFT-conv (h, window) or (h, kh, kw).
    values: np.ndarray
    full: bool  # whether this is the matrix of DAFT-full
    causal: bool


class KeyMaps(NamedTuple):
    """An image and the weights of its tokens by their keys alone: exp(K) over its mean; 1 is an even share."""

    image: np.ndarray  # (H, W, 3) or (H, W), 0..1, as the model saw it
    layers: list[np.ndarray]  # each (heads, Y, X), NaN for places without a token
    heads_are: str  # "head", or "channel" in DAFT-full, which has a key for each


@torch.no_grad()
def position_biases(model: nn.Module) -> list[Bias]:
    """The ``Bias`` of every DAFT module of ``model``, in the order of its layers; filters before Gumbel selection.

    Raises:
        ValueError: ``model`` has no such module.
    """
    biases = []
    for module in model.modules():
        if not isinstance(module, (DaftConvAttention, DaftFullAttention)):
            continue
        w, full = module.position_bias().float(), isinstance(module, DaftFullAttention)
        if full and module.causal:
            w = w.masked_fill(torch.ones_like(w, dtype=torch.bool).triu(1), torch.nan)
        biases.append(Bias(torch.expm1(w).numpy(), full, module.causal))
    if not biases:
        raise ValueError(f"the checkpoint is of a {type(model).__name__} without DAFT; allowed: a model that holds it")
    return biases


def key_maps(loaded: Loaded, path: Path) -> KeyMaps:
    """The keys of an image in every layer of a model of images or of pixels.

    Raises:
        ValueError: ``path`` is no image, or the model reads text or pixels of images that are not square.
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"--image is {path}, which cannot be read ({error}); allowed: an image file") from error
    if loaded.reads == "text":
        raise ValueError(f"--image is {path}; allowed with a language model of text: no --image")
    if loaded.reads == "pixels":
        return _maps_of_pixels(loaded.model, image)
    return _maps_of_vision(loaded.model, loaded.data, image)


@torch.no_grad()
def _maps_of_vision(model: nn.Module, data: dict[str, Any], image: Image.Image) -> KeyMaps:
    """Key maps of an image model, with the preprocessing of timm's evaluation."""
    from timm.data import create_transform

    if model.in_chans not in (1, 3):
        raise ValueError(f"the model reads {model.in_chans} channels; allowed with --image: 1 or 3")
    grey = model.in_chans == 1
    if grey:  # timm's defaults have three numbers, whatever the number of channels
        data = {**data, **{name: (sum(data[name]) / len(data[name]),) for name in ("mean", "std")}}
    pixels = create_transform(**data, is_training=False)(image.convert("L") if grey else image)  # (C, H, W)
    with record_keys(model) as records:
        model(pixels[None])
    grid, prefix = model.patch_embed.dynamic_feat_size(pixels.shape[1:]), model.num_prefix_tokens
    maps = [_shares(record.keys[0, :, prefix:]).unflatten(1, grid).numpy() for record in records]
    mean, std = (torch.tensor(data[name]).view(-1, 1, 1) for name in ("mean", "std"))
    shown = (pixels * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()  # (C, H, W) -> (H, W, C)
    return KeyMaps(shown[..., 0] if grey else shown, maps, _heads_are(model))


@torch.no_grad()
def _maps_of_pixels(model: nn.Module, image: Image.Image) -> KeyMaps:
    """Key maps of a model of pixels, as pixel_modeling reads an image; a pixel has the mean of its subpixels."""
    from fairseq_plugin.data.pixels import to_tokens

    shape = _square_shape(model.max_positions())
    resized = image.convert("L" if shape.channels == 1 else "RGB").resize((shape.width, shape.height))
    values = torch.from_numpy(np.array(resized)).view(1, *shape)  # (1, H, W, C)
    tokens = to_tokens(values)  # (1, T)
    start = torch.full_like(tokens[:, :1], 2)  # fairseq's </s>, which begins an image
    with record_keys(model) as records:
        model(torch.cat([start, tokens[:, :-1]], dim=1))
    maps = []
    for record in records:
        # The model reads </s> and all subpixels but the last, which therefore has no key.
        share = torch.nn.functional.pad(_shares(record.keys[0, :, 1:]), (0, 1), value=torch.nan)  # (heads, T)
        maps.append(share.unflatten(1, shape).nanmean(-1).numpy())  # (heads, H, W, C) -> (heads, H, W)
    shown = values[0].numpy() / 255  # (H, W, C)
    return KeyMaps(shown[..., 0] if shape.channels == 1 else shown, maps, _heads_are(model))


def _square_shape(length: int):
    """The (height, width, channels) of square images of ``length`` subpixels: at most one of grey and colour fits."""
    from fairseq_plugin.data.pixels import ImageShape

    for channels in (1, 3):
        side = round((length / channels) ** 0.5)
        if side * side * channels == length:
            return ImageShape(side, side, channels)
    raise ValueError(f"the model reads images of {length} subpixels; allowed with --image: square ones")


def _shares(keys: Tensor) -> Tensor:
    """Keys (H, n, c) of one image -> exp of each over the mean of its head and channel, (H c, n)."""
    keys = keys.float().transpose(1, 2).flatten(0, 1)  # (H, n, c) -> (H c, n)
    return keys.softmax(1) * keys.shape[1]


def _heads_are(model: nn.Module) -> str:
    return "channel" if any(isinstance(module, DaftFullAttention) for module in model.modules()) else "head"
