"""Tell layers the grid on which a model's tokens lie, if they need it: timm passes only tokens to a layer.

Legend: Y x X the rows and columns of the tokens of a stage of a hierarchical model.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import Tensor, nn

from .attention import SelfAttention
from .position_bias import Grid, check_grid_size, set_grid_size


def host_of_tokens(model: nn.Module) -> nn.Module | None:
    """The vision transformer in ``model``, which may wrap it: the module that has patches and counts prefix tokens."""
    hosts = (
        module for module in model.modules() if hasattr(module, "patch_embed") and hasattr(module, "num_prefix_tokens")
    )
    return next(hosts, None)


def fixed_grid(model: nn.Module) -> Grid | None:
    """Rows and columns of the patches of ``model``; None if they are unknown or differ between images."""
    host = host_of_tokens(model)
    grid = getattr(getattr(host, "patch_embed", None), "grid_size", None)
    return None if grid is None or getattr(host, "dynamic_img_size", False) else tuple(grid)


def fixed_tokens(model: nn.Module) -> int | None:
    """The number of tokens of ``model``, class token and registers included; None as for ``fixed_grid``."""
    grid = fixed_grid(model)
    return None if grid is None else grid[0] * grid[1] + host_of_tokens(model).num_prefix_tokens


def refuse_unknown_tokens(model: nn.Module, name: str, mechanism: str) -> NoReturn:
    """Raise ValueError for a ``mechanism`` that needs the number of tokens of ``model``, called ``name``."""
    host = host_of_tokens(model)
    or_max_tokens = ", or max_tokens" if host is None else ""  # tell_grid needs one image size
    why = "dynamic_img_size is True" if getattr(host, "dynamic_img_size", False) else "max_tokens is not given"
    raise ValueError(
        f"{why}, and {name} has no fixed number of tokens; allowed with attention {mechanism!r}, which holds something "
        f"for each position: a vision transformer for one image size (dynamic_img_size=False){or_max_tokens}"
    )


def check_tokens(model: nn.Module, max_tokens: int | None, grid_size: Grid | None) -> None:
    """Raise ValueError if a user gives a number of tokens, or a grid, that ``model`` does not have."""
    sizes = (("max_tokens", max_tokens, fixed_tokens(model)), ("grid_size", grid_size, fixed_grid(model)))
    for name, value, expected in sizes:
        if value is not None and expected is not None and value != expected:
            raise ValueError(f"{name} is {value}; allowed: {expected}, which is found in the model, or nothing")


def tell_grid(model: nn.Module) -> None:
    """Set the grid of the tokens in the layers of ``model`` that need it. Call it again after ``set_input_size``.

    DAFT-conv and SOFT see neighbours on the grid. DAFT-full's position biases are resampled permanently from the
    previous grid, bicubically as timm resamples positions, and cosFormer's M becomes the new number of tokens: make the
    optimiser after that. ``model`` then refuses images of another grid. If timm drops patches at random
    (``patch_drop_rate``), ``model`` refuses to train mechanisms that depend on the order of tokens.

    Raises:
        ValueError: the tokens do not lie on one grid (images of several sizes, windows, or, for DAFT-conv and SOFT, a
            class token or registers); the layers have another number of positions; another grid than before for
            Linformer, Synthesizer or Sinkhorn, whose weights per position cannot be resampled. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; allowed: a built model, such as timm.create_model gives")
    host, grid = host_of_tokens(model), fixed_grid(model)
    check_layers(model, grid)
    # Dropping random patches destroys the order, the grid and the positions of tokens.
    of_order = [layer.mechanism for layer in _layers([model]) if not layer.attention.permutation_equivariant]
    _refuse_dropping(model, of_order)
    if host is None:
        return
    on_grid = _layers_on_grid(model)
    for layer in on_grid:
        set_grid_size(layer, grid, host.num_prefix_tokens)
    if hasattr(host.patch_embed, "grid_of_attention"):
        host.patch_embed.grid_of_attention = grid if on_grid else None
    elif on_grid:
        host.patch_embed.register_forward_pre_hook(check_grid)
        host.patch_embed.grid_of_attention = grid


def check_layers(model: nn.Module, grid: Grid | None) -> None:
    """Raise ValueError, as ``tell_grid`` does, unless the layers of ``model`` can be told ``grid``, None if unknown."""
    host = host_of_tokens(model)
    for layer in _layers_on_grid(model):
        if host is None and (layer.has_positions or layer.grid_size is not None):
            continue  # a user has set what it needs
        if grid is None or (layer.needs_grid and host.num_prefix_tokens):
            alone = ", class_token=False, global_pool='avg' and no registers" if layer.needs_grid else ""
            raise ValueError(
                f"the model's tokens are not those of one grid; allowed with {layer.mechanism!r}: one image size "
                f"(dynamic_img_size=False){alone}"
            )
        check_grid_size(layer, grid, host.num_prefix_tokens)


def stage_grids(grid_size: Grid, stages: int) -> list[Grid]:
    """(Y, X) of each stage's tokens: ``grid_size``, then half of the previous grid, rounded up."""
    grids = [tuple(grid_size)]
    while len(grids) < stages:
        grids.append(tuple(-(-side // 2) for side in grids[-1]))
    return grids


def set_grid_of_neighbours(blocks: Iterable[nn.Module], grid: Grid) -> bool:
    """Set the grid in the layers of ``blocks`` that see neighbours; returns whether there are any."""
    layers = [layer for layer in _layers(blocks) if layer.needs_grid]
    for layer in layers:
        layer.grid_size = grid
    return bool(layers)


def set_stage_grids(stages: Iterable[nn.Module], grids: Sequence[Grid]) -> None:
    """Change the attention of ``stages`` that has a grid, permanently, to ``grids``; ValueError if that fails."""
    pairs = [(layer, grid) for stage, grid in zip(stages, grids) for layer in _layers([stage])]
    pairs = [(layer, grid) for layer, grid in pairs if layer.grid_size is not None]
    for fit in (check_grid_size, set_grid_size):  # all checks come before any change
        for layer, grid in pairs:
            fit(layer, grid, 0)


def _layers(modules: Iterable[nn.Module]) -> list[SelfAttention]:
    return [layer for module in modules for layer in module.modules() if isinstance(layer, SelfAttention)]


def _layers_on_grid(model: nn.Module) -> list[SelfAttention]:
    return [layer for layer in _layers([model]) if layer.needs_grid or layer.has_positions]


def _refuse_dropping(model: nn.Module, mechanisms: list[str]) -> None:
    """Make timm's patch dropping in ``model`` refuse to train ``mechanisms``; an empty list lifts the refusal."""
    for module in model.modules():
        if isinstance(module, (PatchDropout, PatchDropoutWithIndices)):
            if hasattr(module, "attention_of_order"):
                module.attention_of_order = mechanisms[0] if mechanisms else ""
            elif mechanisms:
                module.register_forward_pre_hook(check_dropping)
                module.attention_of_order = mechanisms[0]


def check_grid(self: nn.Module, input: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before timm's ``PatchEmbed``: ValueError if ``set_input_size`` has changed the grid that layers know."""
    old, new = self.grid_of_attention, self.grid_size
    if old is None:  # a separate condition, for TorchScript
        return input
    if old[0] != new[0] or old[1] != new[1]:
        raise ValueError(
            f"the model's tokens lie on {new[0]} x {new[1]} since set_input_size, and its attention knows "
            f"{old[0]} x {old[1]}; run timm_plugin.tell_grid(model)"
        )
    return input


def check_dropping(self: nn.Module, input: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before timm's ``PatchDropout``: ValueError if it would destroy the order that layers need."""
    if self.training and self.prob > 0.0 and self.attention_of_order != "":
        raise ValueError(
            f"patch_drop_rate is {self.prob}; allowed when training attention '{self.attention_of_order}', which reads "
            "where tokens lie: 0"
        )
    return input
