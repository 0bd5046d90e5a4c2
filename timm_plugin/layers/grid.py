"""The grid on which a model's tokens lie, told to the layers that must know it: timm hands a layer tokens alone."""

from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import Tensor, nn

from .attention import OF_SETS, SelfAttention
from .position_bias import Grid, check_grid_size, set_grid_size


def host_of_tokens(model: nn.Module) -> nn.Module | None:
    """The vision transformer in ``model``, which may be wrapped: what has patches and counts the tokens beside them."""
    hosts = (
        module for module in model.modules() if hasattr(module, "patch_embed") and hasattr(module, "num_prefix_tokens")
    )
    return next(hosts, None)


def fixed_grid(model: nn.Module) -> Grid | None:
    """Rows and columns of the patches of ``model``; None where they are unknown or differ from image to image."""
    host = host_of_tokens(model)
    grid = getattr(getattr(host, "patch_embed", None), "grid_size", None)
    return None if grid is None or getattr(host, "dynamic_img_size", False) else tuple(grid)


def check_given(model: nn.Module, max_tokens: int | None, grid_size: Grid | None) -> None:
    """Raise ValueError where a user gives another number of tokens, or another grid of them, than ``model`` has."""
    grid = fixed_grid(model)
    if grid is None:
        return
    tokens = grid[0] * grid[1] + host_of_tokens(model).num_prefix_tokens
    for name, value, own in (("max_tokens", max_tokens, tokens), ("grid_size", grid_size, grid)):
        if value is not None and value != own:
            raise ValueError(f"{name} is {value}; allowed: {own}, which is found in the model, or nothing")


def tell_grid(model: nn.Module) -> None:
    """Tell the layers of ``model`` that must know it on which grid its tokens lie; again after ``set_input_size``.

    DAFT-conv and SOFT see neighbours on the grid. DAFT-full's position biases are resampled, for good, from the grid
    that was told before, bicubically as timm resamples positions, and cosFormer's M becomes the new number of tokens:
    make the optimiser after that. ``model`` refuses images of another grid then. Where timm drops patches at random
    (``patch_drop_rate``), it refuses to train mechanisms to which the order of tokens matters.

    Raises:
        ValueError: the tokens do not lie on one grid: images of several sizes, windows, or, for DAFT-conv and SOFT, a
            class token or registers; they are not as many as the layers hold positions for; another grid than before
            for Linformer, Synthesizer or Sinkhorn, whose weights per position nobody resamples. Nothing has changed.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; allowed: a built model, such as timm.create_model gives")
    host, grid = host_of_tokens(model), fixed_grid(model)
    check_layers(model, grid)
    _refuse_dropping(model, [layer.mechanism for layer in _layers(model) if layer.mechanism not in OF_SETS])
    if host is None:
        return
    on_grid = _layers_on_grid(model)
    for layer in on_grid:
        if layer.has_positions:
            set_grid_size(layer.attention, grid, layer.grid_size or grid, host.num_prefix_tokens)
        layer.grid_size = grid
    if hasattr(host.patch_embed, "grid_of_attention"):
        host.patch_embed.grid_of_attention = grid if on_grid else None
    elif on_grid:
        host.patch_embed.register_forward_pre_hook(check_grid)
        host.patch_embed.grid_of_attention = grid


def check_layers(model: nn.Module, grid: Grid | None) -> None:
    """Raise ValueError, as ``tell_grid`` does, unless the layers of ``model`` can be told ``grid``, None for no one."""
    host = host_of_tokens(model)
    for layer in _layers_on_grid(model):
        if host is None and (layer.has_positions or layer.grid_size is not None):
            continue  # a user said what it must know
        if grid is None or (layer.needs_grid and host.num_prefix_tokens):
            alone = ", class_token=False, global_pool='avg' and no registers" if layer.needs_grid else ""
            raise ValueError(
                f"the model's tokens are not those of one grid; allowed with {layer.mechanism!r}: one image size "
                f"(dynamic_img_size=False){alone}"
            )
        if layer.has_positions:
            check_grid_size(layer.mechanism, layer.attention, grid, layer.grid_size or grid, host.num_prefix_tokens)


def _layers(model: nn.Module) -> list[SelfAttention]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


def _layers_on_grid(model: nn.Module) -> list[SelfAttention]:
    return [layer for layer in _layers(model) if layer.needs_grid or layer.has_positions]


def _refuse_dropping(model: nn.Module, mechanisms: list[str]) -> None:
    """Let timm's patch dropping in ``model`` refuse to train ``mechanisms``; it takes anything again where none is."""
    for module in model.modules():
        if isinstance(module, (PatchDropout, PatchDropoutWithIndices)):
            if hasattr(module, "attention_of_order"):
                module.attention_of_order = mechanisms[0] if mechanisms else ""
            elif mechanisms:
                module.register_forward_pre_hook(check_dropping)
                module.attention_of_order = mechanisms[0]


def check_grid(self: nn.Module, input: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before timm's ``PatchEmbed``: ValueError if ``set_input_size`` has changed the grid that layers know."""
    known, own = self.grid_of_attention, self.grid_size
    if known is None:  # by itself, for TorchScript
        return input
    if known[0] != own[0] or known[1] != own[1]:
        raise ValueError(
            f"the model's tokens lie on {own[0]} x {own[1]} since set_input_size, and its attention knows "
            f"{known[0]} x {known[1]}; run timm_plugin.tell_grid(model)"
        )
    return input


def check_dropping(self: nn.Module, input: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before timm's ``PatchDropout``: ValueError where it would take away the order that layers read."""
    if self.training and self.prob > 0.0 and self.attention_of_order != "":
        raise ValueError(
            f"patch_drop_rate is {self.prob}; allowed when training attention '{self.attention_of_order}', which reads "
            "where tokens lie: 0"
        )
    return input
