"""The grid on which a model's tokens lie, told to the layers that must know it: timm hands a layer tokens alone."""

from torch import Tensor, nn

from .attention import SelfAttention


def host_of_tokens(model: nn.Module) -> nn.Module | None:
    """The vision transformer in ``model``, which may be wrapped: what has patches and counts the tokens beside them."""
    hosts = (
        module for module in model.modules() if hasattr(module, "patch_embed") and hasattr(module, "num_prefix_tokens")
    )
    return next(hosts, None)


def fixed_grid(model: nn.Module) -> tuple[int, int] | None:
    """Rows and columns of the patches of ``model``; None where they are unknown or differ from image to image."""
    host = host_of_tokens(model)
    grid = getattr(getattr(host, "patch_embed", None), "grid_size", None)
    return None if grid is None or getattr(host, "dynamic_img_size", False) else tuple(grid)


def tell_grid(model: nn.Module) -> None:
    """Tell the layers of ``model`` that need it on which grid its tokens lie; again after timm's ``set_input_size``.

    Layers whose class was made with a ``grid_size`` keep that. ``model`` refuses images of another grid then.

    Raises:
        ValueError: the tokens do not lie on one grid: images of several sizes, a class token, registers, windows. The
            layers are as they were then.
    """
    layers = [module for module in model.modules() if isinstance(module, SelfAttention) and module.needs_grid]
    layers = [layer for layer in layers if type(layer).grid_size is None]
    if not layers:
        return
    host, grid = host_of_tokens(model), fixed_grid(model)
    if grid is None or host.num_prefix_tokens:
        raise ValueError(
            f"the model's tokens are not those of one grid; allowed with {layers[0].mechanism!r}: one image size "
            "(dynamic_img_size=False), class_token=False, global_pool='avg' and no registers"
        )
    for layer in layers:
        layer.grid_size = grid
    if not hasattr(host.patch_embed, "grid_of_attention"):
        host.patch_embed.register_forward_pre_hook(check_grid)
    host.patch_embed.grid_of_attention = grid


def check_grid(self: nn.Module, input: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before timm's ``PatchEmbed``: ValueError if ``set_input_size`` has changed the grid that layers know."""
    known, own = self.grid_of_attention, self.grid_size
    if known[0] != own[0] or known[1] != own[1]:
        raise ValueError(
            f"the model's tokens lie on {own[0]} x {own[1]} since set_input_size, and its attention knows "
            f"{known[0]} x {known[1]}; run timm_plugin.tell_grid(model)"
        )
    return input
