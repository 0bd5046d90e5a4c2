"""Attention in the stages of a hierarchical model, each with its own grid, number of tokens and options.

Legend: Y x X the rows and columns of a stage's tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from timm.layers.typing import LayerType
from torch import nn

from .attention import SelfAttention, attention_layer
from .position_bias import Grid, check_grid_size, set_grid_size
from .stacks import is_pattern, is_stack, kinds_of, with_options, with_own

#: Options that differ from stage to stage unless they are given, from the number of stages that follow. SOFT's authors
#: have ratios 8, 4, 2 and 1, which make 49 landmarks of 56 x 56, 28 x 28, 14 x 14 and 7 x 7 tokens.
BY_STAGE: dict[str, Callable[[int], dict[str, Any]]] = {"soft": lambda following: {"ratio": 2**following}}


def stage_grids(grid_size: Grid, stages: int) -> list[Grid]:
    """(Y, X) of each stage's tokens: ``grid_size`` of the first, and half of the one before, rounded up, of others."""
    grids = [tuple(grid_size)]
    while len(grids) < stages:
        grids.append(tuple(-(-side // 2) for side in grids[-1]))
    return grids


def stage_layers(attn_layer: LayerType, grids: Sequence[Grid], dynamic: bool, **options: Any) -> list[LayerType]:
    """``attn_layer`` for each stage, told the number of tokens of that stage, ``grids``, where it must know it.

    Args:
        attn_layer: a name or class of timm's or ours, or a pattern of our names, which repeats over the stages. A class
            of ours that says a number of tokens itself is taken as it is.
        dynamic: whether images may have any size.
        options: of the mechanism by their names: one value, or a list or tuple of as many as there are stages; None for
            the default. In a pattern an option is that of every mechanism that has it.

    Raises:
        ValueError: an option that the mechanism does not have or allow; a mechanism that holds something for each
            position, with ``dynamic``; a pattern of more layers than there are stages.
    """
    kinds = _kinds_by_stage(attn_layer, len(grids), options)
    own = _options_by_stage(kinds)
    return [_told(with_options(kinds[i][0], **own[i]), grid, dynamic) for i, grid in enumerate(grids)]


def tell_stage(blocks: Sequence[nn.Module], grid: Grid) -> bool:
    """Tell the layers of ``blocks`` that see neighbours on which grid their tokens lie; whether there are any."""
    layers = [layer for layer in _layers(blocks) if layer.needs_grid]
    for layer in layers:
        layer.grid_size = grid
    return bool(layers)


def check_stage_grids(stages: Iterable[nn.Module], grids: Sequence[Grid]) -> None:
    """Raise ValueError unless the attention of ``stages`` can be fitted to ``grids``; nothing changes."""
    for layer, grid in _layers_that_know(stages, grids):
        if layer.has_positions:
            check_grid_size(layer.mechanism, layer.attention, grid, layer.grid_size, 0)


def set_stage_grids(stages: Iterable[nn.Module], grids: Sequence[Grid]) -> None:
    """Fit the attention of ``stages``, which ``check_stage_grids`` allows, for good, to ``grids``."""
    for layer, grid in _layers_that_know(stages, grids):
        if layer.has_positions:
            set_grid_size(layer.attention, grid, layer.grid_size, 0)
        layer.grid_size = grid


def _kinds_by_stage(
    attn_layer: LayerType, stages: int, options: dict[str, Any]
) -> list[tuple[LayerType, dict[str, Any]]]:
    """The name or class of each stage, and those of ``options`` that are for it."""
    if is_stack(attn_layer):
        attn_layer, options = attn_layer.pattern, {**attn_layer.options, **options}
    if is_pattern(attn_layer):
        return with_own(kinds_of(attn_layer, stages), options)
    return [(attn_layer, options)] * stages


def _options_by_stage(kinds: Sequence[tuple[LayerType, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The options of each stage: its own value where there is one for each, and those of ``BY_STAGE`` not given."""
    by_stage, stages = [], len(kinds)
    for i, (attn_layer, options) in enumerate(kinds):
        own = {name: value[i] if _is_one_each(value, stages) else value for name, value in options.items()}
        if isinstance(attn_layer, str) and attn_layer in BY_STAGE:
            given = {name: value for name, value in own.items() if value is not None}
            own = {**own, **BY_STAGE[attn_layer](stages - 1 - i), **given}
        by_stage.append(own)
    return by_stage


def _is_one_each(value: Any, stages: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == stages


def _told(attn_layer: LayerType, grid: Grid, dynamic: bool) -> LayerType:
    """``attn_layer`` that knows the number of tokens of ``grid`` where it must and does not say it."""
    if not (isinstance(attn_layer, type) and issubclass(attn_layer, SelfAttention) and attn_layer.needs_tokens()):
        return attn_layer
    if dynamic:
        raise ValueError(
            f"dynamic_img_size is True; allowed with attention {attn_layer.mechanism!r}, which holds something for "
            "each position: False, and set_input_size for images of another size"
        )
    options = attn_layer.options.as_dict()
    return attention_layer(attn_layer.mechanism, max_tokens=grid[0] * grid[1], grid_size=grid, **options)


def _layers(blocks: Iterable[nn.Module]) -> list[SelfAttention]:
    return [layer for block in blocks for layer in block.modules() if isinstance(layer, SelfAttention)]


def _layers_that_know(stages: Iterable[nn.Module], grids: Sequence[Grid]) -> list[tuple[SelfAttention, Grid]]:
    """The layers of ``stages`` that were told their grid, each with its stage's in ``grids``."""
    pairs = [(layer, grid) for stage, grid in zip(stages, grids) for layer in _layers([stage])]
    return [(layer, grid) for layer, grid in pairs if layer.grid_size is not None]
