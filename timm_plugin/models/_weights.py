"""Adapt weights of other models as a start for ours, for timm's ``pretrained=True``.

``load_state_dict`` does not use this; it accepts only the model's own tensors.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter_fn
from torch import Tensor, nn

from common.attention import InnerAttention
from common.checkpoints import check_state_dict, leave_out_foreign_extra_states
from common.modules.stored_options import is_extra_state

from ..layers.position_bias import resample_grid_bias, resample_position_bias

StateDict = dict[str, Any]
logger = logging.getLogger("timm_plugin")

#: The parameter names of the authors' vision model (thuml/Flowformer, Flowformer_CV/flowformer.py), and our names; the
#: first pattern that matches counts.
RELEASED_NAMES: tuple[tuple[str, str], ...] = (
    (r"^pos_embed$", r"pos_embed.weight"),
    (r"^patch_embed\.0\.", r"patch_embed."),
    (r"^patch_embed\.(\d+)\.proj\.", r"stages.\1.downsample.proj."),
    (r"^blocks\.(\d+)\.(\d+)\.gamma$", r"stages.\1.blocks.\2.ls2.gamma"),
    (r"^blocks\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"^head\.", r"head.fc."),
)
#: Prefix tokens; their positions come first in ``pos_embed``, in this order.
_PREFIX_TOKENS = ("cls_token", "dist_token")
#: The second classifier of a distilled transformer.
_DISTILLED_HEAD = ("head_dist.weight", "head_dist.bias")


def released_name(name: str) -> str:
    """Our name for the authors' parameter ``name``; a name without a rule is the same."""
    for pattern, replacement in RELEASED_NAMES:
        if re.search(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def fit_hierarchical(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Weights of a hierarchical Flowformer, ours or the authors': patches and positions are resampled.

    Raises:
        ValueError: the weights do not fit ``model``, or their positions belong to an unknown grid.
    """
    state_dict = _unwrapped(state_dict)
    if "patch_embed.0.proj.weight" in state_dict:  # the authors' names
        state_dict = {released_name(name): tensor for name, tensor in state_dict.items()}
    patches, positions = state_dict.get("patch_embed.proj.weight"), state_dict.get("pos_embed.weight")
    if positions is not None:
        grid = source_grid(positions.shape[1], patches, model)
        new_grid = list(model.pos_embed.grid_size)
        state_dict["pos_embed.weight"] = resample_abs_pos_embed(positions, new_grid, grid, num_prefix_tokens=0)
    if patches is not None and patches.shape[-2:] != tuple(model.patch_embed.patch_size):
        state_dict["patch_embed.proj.weight"] = resample_patch_embed(patches, list(model.patch_embed.patch_size))
    return checked(state_dict, model)


def fit_vision_transformer(state_dict: StateDict, model: nn.Module, values_only: bool = False) -> StateDict:
    """Weights of timm's ViT or DeiT, or of one of our models, for ``model`` of the same shape.

    Patches, positions, DAFT-full's position biases and those of gated attention units are resampled. Tokens, positions
    and a classifier that the model does not have are dropped. If the weights are from a model without DAFT, position
    biases and filters are new, and ``values_only`` uses only the values' rows of ``qkv`` (DAFT-conv's procedure in the
    paper).

    Raises:
        ValueError: the weights do not fit ``model``, or their positions belong to an unknown grid.
    """
    state_dict, own = _unwrapped(state_dict), model.state_dict()
    left_out = _leave_out(state_dict, own)
    for parameter in ("weight", "bias"):  # the last normalisation is before or after the pooling
        names = f"norm.{parameter}", f"fc_norm.{parameter}"
        for there, here in (names, names[::-1]):
            if there in state_dict and here in own and there not in own:
                state_dict[here] = state_dict.pop(there)
    patches = state_dict.get("patch_embed.proj.weight")
    stock = not any(".attn.attention." in name and not is_extra_state(name) for name in state_dict)
    if not any(".attn.attention." in name for name in state_dict) and _has_other_attention(model):
        logger.info(
            f"{type(model).__name__}: if these weights were trained with softmax attention, they are a start for "
            "another model; python -m timm_plugin.transfer teaches its attention what the softmax attention gave"
        )
    grid, prefix, in_part = model.patch_embed.grid_size, model.num_prefix_tokens, []
    if "pos_embed" in state_dict and "pos_embed" in own:  # timm takes any number for a square
        source_grid(state_dict["pos_embed"].shape[1] - (0 if model.no_embed_class else prefix), patches, model)
    for name, tensor in state_dict.items():
        parameter = name.rpartition(".attn.attention.")[2]
        if name in own and parameter in ("pe0", "pe1", "w"):
            old = source_grid(len(tensor) - prefix, patches, model)
            state_dict[name] = resample_position_bias(parameter, tensor, grid, old, prefix)
        elif name in own and name.endswith(".bias.weight") and tensor.dim() == 3 == own[name].dim():
            rows, columns = own[name].shape[1:]
            has_chunks = getattr(model.blocks[0], "chunk_rows", None) is not None  # rows of a chunk, for any image size
            state_dict[name] = resample_grid_bias(tensor, [tensor.shape[1] if has_chunks else rows, columns])
        elif stock and values_only and name in own and ".attn.qkv." in name and tensor.shape[1:] == own[name].shape[1:]:
            if len(tensor) == 3 * model.embed_dim:
                state_dict[name] = torch.cat([own[name][: -model.embed_dim], tensor[-model.embed_dim :].to(own[name])])
                in_part.append(name)
    fitted = timm_filter_fn(state_dict, model, adapt_layer_scale=True)
    new = [name for name in own if ".attn.attention." in name and not is_extra_state(name)] if stock else []
    return checked(fitted, model, left_out, new, in_part)


def checked(
    fitted: StateDict,
    model: nn.Module,
    left_out: Iterable[str] = (),
    new: Iterable[str] = (),
    in_part: Iterable[str] = (),
) -> StateDict:
    """``fitted`` for ``model``, without a classifier that timm replaces; a warning lists the weights that are not used.

    Image channels may differ: timm adapts the first convolution after this.

    Args:
        left_out: names in the checkpoint that the model does not have.
        new: names of the model that may be missing.
        in_part: names of ``fitted`` of which only a part is from the checkpoint.

    Raises:
        ValueError: names other than ``new`` are missing, there are unknown names, or shapes differ.
    """
    own, cfg = model.state_dict(), getattr(model, "pretrained_cfg", None) or {}
    left_out, new = list(left_out), list(new)
    leave_out_foreign_extra_states(fitted, model)
    classifiers = cfg.get("classifier", "classifier")  # two if a transformer is distilled
    classifiers = tuple(f"{name}." for name in ([classifiers] if isinstance(classifiers, str) else classifiers))
    stem = f"{cfg.get('first_conv', 'first_conv')}."
    if model.num_classes != cfg.get("num_classes", model.num_classes):
        left_out += [name for name in fitted if name.startswith(classifiers)]
        new += [name for name in own if name.startswith(classifiers)]
        fitted = {name: tensor for name, tensor in fitted.items() if not name.startswith(classifiers)}
    complete = {**{name: own[name] for name in new}, **fitted}
    weight = f"{stem}weight"
    if (
        weight in fitted
        and fitted[weight].shape[2:] == own[weight].shape[2:]
        and len(fitted[weight]) == len(own[weight])
    ):
        complete[weight] = own[weight]
    check_state_dict(complete, model)
    lists = [("left out", left_out), ("new, as first drawn", new), ("taken in part", in_part)]
    summary = "; ".join(f"{label}: {_grouped(names)}" for label, names in lists if names)
    whole = sum(not is_extra_state(name) for name in fitted) - len(list(in_part))
    message = f"{type(model).__name__}: {whole} tensors of the checkpoint are taken"
    logger.log(logging.WARNING if summary else logging.INFO, f"{message}; {summary}" if summary else message)
    return fitted


def source_grid(tokens: int, patches: Tensor | None, model: nn.Module) -> tuple[int, int]:
    """The grid (rows, columns) of a checkpoint's positions: its image size over its patch, or the model's, or a square.

    The checkpoint's image size is stored in its folder, or is ``input_size`` in ``pretrained_cfg_overlay``.
    """
    cfg = getattr(model, "pretrained_cfg", None) or {}  # a model built without create_model has none
    size = getattr(model, "pretrained_model_args", {}).get("img_size") or cfg.get(
        "input_size", model.patch_embed.img_size
    )
    size = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    patch = model.patch_embed.patch_size if patches is None else patches.shape[-2:]
    stated = tuple(math.ceil(pixels / side) for pixels, side in zip(size, patch))
    side = math.isqrt(tokens)
    for grid in (stated, tuple(model.patch_embed.grid_size), (side, side)):
        if grid[0] * grid[1] == tokens:
            return grid
    raise ValueError(
        f"the checkpoint has {tokens} positions and input_size {size}; allowed: a square grid, or its own "
        "size in pretrained_cfg_overlay=dict(input_size=(channels, height, width))"
    )


def _unwrapped(state_dict: StateDict) -> StateDict:
    """A copy of the state dict, which may be the entry "model" or "state_dict" of a checkpoint."""
    for wrapper in ("model", "state_dict"):
        state_dict = state_dict.get(wrapper, state_dict)
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"the checkpoint's {name!r} is a {type(tensor).__name__}; allowed: tensors by name")
    return dict(state_dict)


def _has_other_attention(model: nn.Module) -> bool:
    return any(isinstance(module, InnerAttention) and module.name != "softmax" for module in model.modules())


def _leave_out(state_dict: StateDict, own: StateDict) -> list[str]:
    """Remove tokens, their positions and a second classifier that ``own`` lacks from ``state_dict``, in place."""
    present = [name for name in _PREFIX_TOKENS if name in state_dict]
    optional = [*_PREFIX_TOKENS, *_DISTILLED_HEAD, *(() if "pos_embed" in own else ("pos_embed", "reg_token"))]
    left_out = [name for name in optional if name in state_dict and name not in own]
    for name in left_out:
        del state_dict[name]
    positions = state_dict.get("pos_embed")
    remaining = [i for i, name in enumerate(present) if name not in left_out]
    # A square number of positions belongs to patches only (timm's no_embed_class).
    if (
        positions is not None
        and len(remaining) < len(present)
        and math.isqrt(positions.shape[1]) ** 2 != positions.shape[1]
    ):
        state_dict["pos_embed"] = positions[:, remaining + list(range(len(present), positions.shape[1]))]
    return left_out


def _grouped(names: Iterable[str]) -> str:
    """All ``names``; names that differ only in a block's number are one name with a count."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())
