"""Resample position biases, and anything else that attention stores for each position, to other image sizes.

Legend: N tokens, n the width of the factors, prefix the class token and registers, which come first.
"""

import torch
from timm.layers import resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from common.attention import CosformerAttention, DaftFullAttention

from .attention import SelfAttention

Grid = tuple[int, int]


class GridBias(nn.Module):
    """A learned bias on scores for each distance in rows and columns on a grid (Y, X): (H, 2 Y - 1, 2 X - 1).

    ``bias(tokens)`` is (H, Y X, Y X), as ``GatedAttentionUnit`` expects; row m, column k is for query m and key k.
    """

    def __init__(self, grid_size: Grid, heads: int = 1) -> None:
        super().__init__()
        self.grid_size = tuple(grid_size)
        self.weight = nn.Parameter(torch.empty(heads, *(2 * side - 1 for side in grid_size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the bias from a truncated normal distribution of deviation 0.02."""
        trunc_normal_(self.weight, std=0.02)

    def forward(self, tokens: int) -> Tensor:
        """The bias of all tokens of the grid, (H, Y X, Y X); ValueError for another number of tokens."""
        rows, columns = self.grid_size
        if tokens != rows * columns:
            raise ValueError(
                f"x has {tokens} tokens; allowed by its relative bias: {rows} x {columns}; set_input_size takes others"
            )
        position = torch.arange(tokens, device=self.weight.device)
        down, right = position // columns, position % columns
        return self.weight[:, down[:, None] - down + rows - 1, right[:, None] - right + columns - 1]

    def set_grid_size(self, grid_size: Grid) -> None:
        """Resample the bias, permanently, to another grid."""
        shape = [2 * side - 1 for side in grid_size]
        weight = resample_grid_bias(self.weight.detach(), shape)
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        self.grid_size = tuple(grid_size)


def resample_grid_bias(bias: Tensor, shape: list[int]) -> Tensor:
    """bias (H, 2 Y - 1, 2 X - 1) -> (H, *shape), bicubically; distance 0 and the longest ones keep their values."""
    if list(bias.shape[1:]) == list(shape):
        return bias
    resampled = F.interpolate(bias[None].float(), size=shape, mode="bicubic", align_corners=True)
    return resampled[0].to(bias.dtype)


def resample_position_bias(name: str, bias: Tensor, new: Grid, old: Grid, num_prefix_tokens: int) -> Tensor:
    """pe0, pe1 (N, n) or w (N, N) for the tokens of the grid ``new``, bicubically; ``name`` tells w from a factor."""

    def resample(x: Tensor) -> Tensor:
        return resample_abs_pos_embed(x[None], list(new), list(old), num_prefix_tokens=num_prefix_tokens)[0]

    bias = resample(bias)
    return resample(bias.transpose(0, 1)).transpose(0, 1).contiguous() if name == "w" else bias


def check_grid_size(layer: SelfAttention, new: Grid, num_prefix_tokens: int) -> None:
    """Raise ValueError unless ``set_grid_size`` can change ``layer`` from its grid, if it has one, to ``new``."""
    attention, old = layer.attention, layer.grid_size or new
    if not layer.has_positions:
        return
    tokens = old[0] * old[1] + num_prefix_tokens
    if attention.max_tokens != tokens:
        raise ValueError(
            f"max_tokens is {attention.max_tokens}, and {old[0]} x {old[1]} patches with {num_prefix_tokens} other "
            f"tokens are {tokens}; allowed: timm_plugin.tell_grid before set_input_size as well, or max_tokens={tokens}"
        )
    if new == old or isinstance(attention, CosformerAttention):
        return
    if not isinstance(attention, DaftFullAttention):
        raise ValueError(
            f"the tokens lie on {new[0]} x {new[1]}; allowed for attention {layer.mechanism!r}, whose weights belong "
            f"to positions and are not resampled: {old[0]} x {old[1]}, for which it was built"
        )
    computed = [name for name in ("pe0", "pe1", "w") if is_parametrized(attention, name)]
    if computed:
        raise ValueError(
            f"{', '.join(computed)} of the attention is parametrised; allowed for another image size: plain "
            "parameters, as torch.nn.utils.parametrize.remove_parametrizations makes them"
        )


def set_grid_size(layer: SelfAttention, new: Grid, num_prefix_tokens: int) -> None:
    """Change ``layer``, which ``check_grid_size`` allows, permanently to tokens of the grid ``new``.

    Position biases are resampled. cosFormer's M becomes the number of tokens, so that its weights decay over an image.
    """
    attention, old = layer.attention, layer.grid_size or new
    layer.grid_size = new
    if new == old or not layer.has_positions:
        return
    for name, parameter in list(attention.named_parameters()):
        resampled = resample_position_bias(name, parameter.detach(), new, old, num_prefix_tokens)
        setattr(attention, name, nn.Parameter(resampled, requires_grad=parameter.requires_grad))
    attention.max_tokens = new[0] * new[1] + num_prefix_tokens
    attention.shape = attention.shape._replace(max_tokens=attention.max_tokens)
