"""FLASH for images: vision transformers of DeiT-S's width whose blocks are gated attention units.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022. The paper has only text models, so the shape is our
choice. It follows these models: two units in place of a Transformer's block, expansion 2, and queries of a sixth of the
width (128 of 768 there, 64 of 384 here, DeiT-S's width of a head). That is 22.7 M parameters, 2.8 % more than
DeiT-S's 22.1 M; in the paper it is 112 M instead of 110 M. Queries of 128 channels would make 23.3 M. There is no class
token, so that chunks are whole rows of an image; tokens are averaged.
"""

from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import generate_default_cfgs

from common.ops.shared.checks import check_positive_int

from ..layers.gated_attention_block import GatedAttentionBlock
from ..layers.images import ImageSize, check_img_size
from ._build import build, check_global_pool, refuse_arguments
from ._default_cfg import untrained_cfg
from ._registry import register_once
from ._vision_transformer import CheckedVisionTransformer
from ._weights import fit_vision_transformer

__all__ = ["FlashVisionTransformer"]  # register_model appends every entry point

#: Arguments of timm's ``VisionTransformer`` for parts that the model does not have, and their only value.
_WITHOUT = {
    "class_token": False,
    "dynamic_img_size": False,
    "dynamic_img_pad": False,
    "reg_tokens": 0,
    "no_embed_class": False,
    "pool_include_prefix": False,
    "patch_drop_rate": 0.0,
    "qkv_bias": True,
    "qk_norm": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "proj_bias": True,
    "act_layer": None,
    "mlp_layer": None,
    "fix_init": False,
}


class FlashVisionTransformer(CheckedVisionTransformer):
    """timm's ``VisionTransformer`` of gated attention units, without class token; the image is a sequence of its rows.

    Args:
        img_size, patch_size: as in timm.
        num_heads, mlp_ratio: heads and expansion of a unit.
        query_dim, chunk_rows, kernel: as in ``GatedAttentionBlock``: ``chunk_rows`` rows of patches are a chunk of
            FLASH, O(N) for images of one width; None is FLASH-Quad, O(N²).
        global_pool, fc_norm: as in timm; by default the mean of normalised tokens.
        kwargs: all other arguments of timm's, except those for parts that this model replaces or lacks. Images have
            one size of whole patches, which ``set_input_size`` changes.

    Raises:
        ValueError: an invalid argument; an image of another size than the model's.
    """

    #: Arguments that change the meaning of the weights, but no shape.
    meaning = ("chunk_rows", "kernel")

    def __init__(
        self,
        img_size: ImageSize = 224,
        patch_size: ImageSize = 16,
        in_chans: int = 3,
        *,
        num_heads: int = 1,
        mlp_ratio: float = 2.0,
        query_dim: int = 64,
        chunk_rows: int | None = None,
        kernel: str = "relu2",
        global_pool: str = "avg",
        fc_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_arguments(kwargs, _WITHOUT, "gated attention units")
        check_global_pool(global_pool, False)
        height, width = check_img_size(img_size, patch_size, False)
        if chunk_rows is not None:
            check_positive_int("chunk_rows", chunk_rows)
        grid_size = tuple(side // patch for side, patch in zip((height, width), to_2tuple(patch_size)))
        unit_args = dict(grid_size=grid_size, query_dim=query_dim, chunk_rows=chunk_rows, kernel=kernel)
        super().__init__(
            img_size,
            patch_size,
            in_chans=in_chans,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            class_token=False,
            global_pool=global_pool,
            fc_norm=fc_norm,
            block_fn=partial(GatedAttentionBlock, **unit_args),
            **{name: value for name, value in kwargs.items() if name not in _WITHOUT},
        )

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's parameters, and the scales, offsets and biases of queries and keys."""
        ends = (".gamma", ".beta", ".bias.weight")
        units = {name for name, _ in self.named_parameters() if name.startswith("blocks.") and name.endswith(ends)}
        return super().no_weight_decay() | units

    @torch.jit.ignore
    def set_input_size(self, img_size: ImageSize | None = None, patch_size: ImageSize | None = None) -> None:
        """Make the model one for another image or patch size, resampling positions, biases and patches.

        Chunks stay as many rows. Parameters are replaced: make the optimiser after that.

        Raises:
            ValueError: as when building a model of that size.
        """
        super().set_input_size(img_size, patch_size)
        for block in self.blocks:
            block.set_grid_size(self.patch_embed.grid_size)

    @torch.jit.ignore
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Refused with a ValueError: timm's reading of JAX's files knows softmax attention alone."""
        raise ValueError(
            f"the checkpoint {checkpoint_path!r} is of JAX; allowed for gated attention units: of torch, of this model"
        )


_cfg = partial(untrained_cfg, paper_ids="arXiv:2202.10447", paper_name="Transformer Quality in Linear Time")

default_cfgs = generate_default_cfgs({"flash_vit_s.untrained": _cfg(), "flash_quad_vit_s.untrained": _cfg()})


_create = partial(build, FlashVisionTransformer, fit_vision_transformer)


@register_once
def flash_vit_s(pretrained: bool = False, **kwargs: Any) -> FlashVisionTransformer:
    """FLASH for images: 24 units of 384 channels, chunks of 2 rows of patches, 22.7 M parameters; not in the paper."""
    model_args = dict(patch_size=16, embed_dim=384, depth=24, query_dim=64, chunk_rows=2)
    return _create("flash_vit_s", pretrained, **dict(model_args, **kwargs))


@register_once
def flash_quad_vit_s(pretrained: bool = False, **kwargs: Any) -> FlashVisionTransformer:
    """FLASH-Quad for images: the same with quadratic attention, 22.7 M parameters; not in the paper."""
    model_args = dict(patch_size=16, embed_dim=384, depth=24, query_dim=64)
    return _create("flash_quad_vit_s", pretrained, **dict(model_args, **kwargs))
