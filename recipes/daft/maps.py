"""The arrays in the pictures: the position biases of a model, and its keys for an image."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from common.attention import DaftConvAttention, DaftFullAttention, record_keys

from ..shared.image_folder import UNREADABLE
from ..shared.trained_models import Loaded


class Bias(NamedTuple):
    """exp(w) - 1 of one layer: the relative change of a token's weight caused by its position."""

    #: DAFT-full: (T, T), NaN for future tokens of a causal model. DAFT-conv: (h, window) or (h, kh, kw).
    values: np.ndarray
    full: bool  # True for DAFT-full
    causal: bool


class KeyMaps(NamedTuple):
    """An image and the weights of its tokens by their keys: exp(K) divided by its mean; 1 is an even share."""

    image: np.ndarray  # (H, W, 3) or (H, W), 0..1, as the model reads it
    layers: list[np.ndarray]  # each (heads, Y, X), NaN for places without a token
    heads_are: str  # "head", or "channel" for DAFT-full, which has one key per channel


@torch.no_grad()
def position_biases(model: nn.Module) -> list[Bias]:
    """The ``Bias`` of every DAFT module of ``model``, in order; filters are those before Gumbel selection.

    Raises:
        ValueError: ``model`` has no DAFT module.
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
    """Compute the keys of an image in every layer of an image or pixel model.

    Raises:
        ValueError: ``path`` is not an image, or the model reads text, or pixels of images that are not square.
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except UNREADABLE as error:
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
    if grey:  # timm's defaults have three numbers for any number of channels
        data = {**data, **{name: (sum(data[name]) / len(data[name]),) for name in ("mean", "std")}}
    pixels = create_transform(**data, is_training=False)(image.convert("L") if grey else image)  # (C, H, W)
    with record_keys(model) as records:
        model(pixels[None])
    grid, prefix = model.patch_embed.dynamic_feat_size(pixels.shape[1:]), model.num_prefix_tokens
    maps = [_shares(record.keys[0, :, prefix:]).unflatten(1, grid).numpy() for record in records]
    mean, std = (torch.tensor(data[name]).view(-1, 1, 1) for name in ("mean", "std"))
    displayed = (pixels * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()  # (C, H, W) -> (H, W, C)
    return KeyMaps(displayed[..., 0] if grey else displayed, maps, _heads_are(model))


@torch.no_grad()
def _maps_of_pixels(model: nn.Module, image: Image.Image) -> KeyMaps:
    """Key maps of a pixel model, which reads images as pixel_modeling does; a pixel gets the mean of its subpixels."""
    from fairseq_plugin.data.pixels import to_tokens

    shape = _square_shape(model.max_positions())
    resized = image.convert("L" if shape.channels == 1 else "RGB").resize((shape.width, shape.height))
    values = torch.from_numpy(np.array(resized)).view(1, *shape)  # (1, H, W, C)
    tokens = to_tokens(values)  # (1, T)
    start = torch.full_like(tokens[:, :1], 2)  # every image starts with fairseq's </s>
    with record_keys(model) as records:
        model(torch.cat([start, tokens[:, :-1]], dim=1))
    maps = []
    for record in records:
        # The model reads </s> and all subpixels except the last, which therefore has no key.
        share = torch.nn.functional.pad(_shares(record.keys[0, :, 1:]), (0, 1), value=torch.nan)  # (heads, T)
        maps.append(share.unflatten(1, shape).nanmean(-1).numpy())  # (heads, H, W, C) -> (heads, H, W)
    displayed = values[0].numpy() / 255  # (H, W, C)
    return KeyMaps(displayed[..., 0] if shape.channels == 1 else displayed, maps, _heads_are(model))


def _square_shape(length: int):
    """The (height, width, channels) of square images of ``length`` subpixels; only one of grey and colour can match."""
    from fairseq_plugin.data.pixels import ImageShape

    for channels in (1, 3):
        side = round((length / channels) ** 0.5)
        if side * side * channels == length:
            return ImageShape(side, side, channels)
    raise ValueError(f"the model reads images of {length} subpixels; allowed with --image: square ones")


def _shares(keys: Tensor) -> Tensor:
    """Keys (H, n, c) of one image -> exp(keys), divided by the mean per head and channel, (H c, n)."""
    keys = keys.float().transpose(1, 2).flatten(0, 1)  # (H, n, c) -> (H c, n)
    return keys.softmax(1) * keys.shape[1]


def _heads_are(model: nn.Module) -> str:
    return "channel" if any(isinstance(module, DaftFullAttention) for module in model.modules()) else "head"
