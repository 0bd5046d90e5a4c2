"""timm's ``VisionTransformer`` with checks of images, the base of the models whose parts depend on the image's size."""

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from ..layers.images import ImageSize, check_images, check_img_size
from ._build import StrictLoading


class CheckedVisionTransformer(StrictLoading, VisionTransformer):
    """timm's ``VisionTransformer``; an image of the wrong shape, or a size that it cannot have, is a ValueError."""

    def __init__(self, *args: Any, in_chans: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, in_chans=in_chans, **kwargs)
        self.patch_embed.in_chans = in_chans  # not from proj, which adapters such as LoRA wrap
        self.patch_embed.register_forward_pre_hook(check_images)  # TorchScript supports hooks, but not super()

    @torch.jit.ignore
    def set_input_size(self, img_size: ImageSize | None = None, patch_size: ImageSize | None = None) -> None:
        """Change the patch size, with resampled patches, and the image size.

        Raises:
            ValueError: as when building a model of that size.
        """
        embed = self.patch_embed
        check_img_size(img_size or embed.img_size, patch_size or embed.patch_size, embed.dynamic_img_pad)
        super().set_input_size(img_size, patch_size)
