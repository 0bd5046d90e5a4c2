"""Image sizes: what the hierarchical model accepts, and its resampled position embedding.

Legend: B batch, C channels, H x W the size of a map.
"""

from typing import Any, Final

import torch
from timm.layers import register_notrace_function, resample_abs_pos_embed, to_2tuple, trunc_normal_
from torch import Tensor, nn

ImageSize = int | tuple[int, int]


class PositionEmbedding(nn.Module):
    """Adds a learned absolute position, one vector of C channels per token, to a map (B, C, H, W).

    Args:
        grid_size: (H, W) the positions belong to.
        dim: C.
        drop: dropout rate of the sum.
        dynamic: resample the positions, bicubically, to every map's own size; otherwise a map must have ``grid_size``.
    """

    dynamic: Final[bool]

    def __init__(
        self,
        grid_size: tuple[int, int],
        dim: int,
        drop: float = 0.0,
        dynamic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid_size = tuple(grid_size)
        self.dynamic = dynamic
        self.weight = nn.Parameter(torch.empty(1, grid_size[0] * grid_size[1], dim, device=device, dtype=dtype))
        self.drop = nn.Dropout(drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new positions."""
        trunc_normal_(self.weight, std=0.02)

    @torch.jit.ignore
    def set_grid_size(self, grid_size: tuple[int, int]) -> None:
        """Resample the positions, permanently, to another grid (H, W)."""
        weight = resample_abs_pos_embed(self.weight, list(grid_size), list(self.grid_size), num_prefix_tokens=0)
        self.weight = nn.Parameter(weight.detach(), requires_grad=self.weight.requires_grad)
        self.grid_size = tuple(grid_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C, H, W)."""
        _, C, H, W = x.shape
        weight = self.weight  # (1, H * W, C)
        if self.dynamic:
            weight = resample_abs_pos_embed(weight, [H, W], self.grid_size, num_prefix_tokens=0)
        return self.drop(x + weight.transpose(1, 2).reshape(1, C, H, W))


def check_img_size(img_size: Any, patch_size: ImageSize, padded: bool) -> tuple[int, int]:
    """The image size that a model is built for, as (height, width).

    Raises:
        ValueError: not one or two whole numbers, smaller than a patch, or not whole patches unless ``padded``.
    """
    size, patch = to_2tuple(img_size), to_2tuple(patch_size)
    if len(size) != 2 or not all(isinstance(side, int) for side in size):
        raise ValueError(f"img_size is {img_size!r}; allowed: an integer or two, (height, width)")
    smallest = (1, 1) if padded else patch
    if size[0] < smallest[0] or size[1] < smallest[1]:
        raise ValueError(f"img_size is {size}; allowed: at least {smallest}")
    if not padded and (size[0] % patch[0] or size[1] % patch[1]):
        raise ValueError(
            f"img_size is {size}; allowed: multiples of the patch {patch}, "
            "or any with dynamic_img_pad=True where a model takes it"
        )
    return size


@torch.fx.wrap
@register_notrace_function
def check_image(
    x: Tensor, in_chans: int, img_size: list[int], patch_size: list[int], dynamic: bool, padded: bool
) -> Tensor:
    """``x`` (B, in_chans, H, W) as it is, or ValueError. A function because FX must not trace it."""
    if x.dim() != 4 or x.shape[1] != in_chans:
        raise ValueError(f"x has shape {list(x.shape)}; allowed: (batch, {in_chans}, height, width)")
    H, W = x.shape[2], x.shape[3]
    if not dynamic:
        if H != img_size[0] or W != img_size[1]:
            raise ValueError(
                f"x has image size {H} x {W}; allowed: {img_size[0]} x {img_size[1]}, "
                "another after set_input_size, or any with dynamic_img_size=True where a model takes it"
            )
    elif not padded and (H % patch_size[0] != 0 or W % patch_size[1] != 0):
        raise ValueError(
            f"x has image size {H} x {W}; allowed: multiples of the patch {patch_size[0]} x {patch_size[1]}, "
            "or any with dynamic_img_pad=True"
        )
    return x


def check_images(self: nn.Module, input: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before timm's ``PatchEmbed``: ValueError for an image of the wrong shape."""
    dynamic = not self.strict_img_size
    return (check_image(input[0], self.in_chans, self.img_size, self.patch_size, dynamic, self.dynamic_img_pad),)
