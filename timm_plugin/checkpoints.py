"""State dicts for the hierarchical Flowformer: our own at any size, and the authors' released ones."""

import math
import re
from typing import Any, Dict, Tuple

from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import nn

from .loading import Adapted

#: The authors' parameter names (thuml/Flowformer, Flowformer_CV/flowformer.py) and ours, first match wins.
RELEASED_NAMES: Tuple[Tuple[str, str], ...] = (
    (r"^pos_embed$", r"pos_embed.weight"),
    (r"^patch_embed\.0\.", r"patch_embed."),
    (r"^patch_embed\.(\d+)\.proj\.", r"stages.\1.downsample.proj."),
    (r"^blocks\.(\d+)\.(\d+)\.gamma$", r"stages.\1.blocks.\2.ls2.gamma"),
    (r"^blocks\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"^head\.", r"head.fc."),
)


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: nn.Module) -> Adapted:
    """The state dict ``model`` can load: unwrapped, the authors' names replaced, patches and positions resampled.

    Raises:
        ValueError: the positions belong to no grid that could be told from their number or the checkpoint's
            ``input_size``.
    """
    state_dict = unwrapped(state_dict)
    if is_released(state_dict):
        state_dict = {released_name(name): tensor for name, tensor in state_dict.items()}
    state_dict = dict(state_dict)
    patches = state_dict.get("patch_embed.proj.weight")
    positions = state_dict.get("pos_embed.weight")
    if positions is not None:
        patch_size = model.patch_embed.patch_size if patches is None else tuple(patches.shape[-2:])
        old_grid = source_grid(positions.shape[1], patch_size, model)
        state_dict["pos_embed.weight"] = resample_abs_pos_embed(
            positions, list(model.pos_embed.grid_size), old_grid, num_prefix_tokens=0
        )
    if patches is not None and tuple(patches.shape[-2:]) != tuple(model.patch_embed.patch_size):
        state_dict["patch_embed.proj.weight"] = resample_patch_embed(patches, list(model.patch_embed.patch_size))
    return Adapted(state_dict)


def is_released(state_dict: Dict[str, Any]) -> bool:
    """Whether a state dict has the authors' names."""
    return "patch_embed.0.proj.weight" in state_dict


def unwrapped(state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """The names and tensors of a checkpoint that may hold them as its "model" or "state_dict"."""
    for wrapper in ("model", "state_dict"):
        state_dict = state_dict.get(wrapper, state_dict)
    return state_dict


def released_name(name: str) -> str:
    """Our name of the authors' parameter ``name``; a name without a rule is the same in both."""
    for pattern, replacement in RELEASED_NAMES:
        if re.search(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def source_grid(tokens: int, patch_size: Tuple[int, int], model: nn.Module) -> Tuple[int, int]:
    """The grid a checkpoint's positions lie on: its ``input_size`` over the patch, or the model's, or else a square."""
    cfg = getattr(model, "pretrained_cfg", None)  # which a model built without create_model has not
    size = tuple(cfg["input_size"][-2:] if cfg else model.patch_embed.img_size)
    own = (math.ceil(size[0] / patch_size[0]), math.ceil(size[1] / patch_size[1]))
    for grid in (own, tuple(model.patch_embed.grid_size)):
        if grid[0] * grid[1] == tokens:
            return grid
    side = math.isqrt(tokens)
    if side * side == tokens:
        return side, side
    raise ValueError(
        f"the checkpoint has {tokens} positions and input_size {size}; allowed: a square grid, or its own "
        "size in pretrained_cfg_overlay=dict(input_size=(channels, height, width))"
    )
