"""DAFT for images: attention-free vision transformers of DeiT's shape.

*A Dot Product Attention Free Transformer*, Tables 2 and 7: DAFT-full with DeiT's class token and position embedding,
DAFT-conv without either, for images of any size. Legend: B batch, C channels, Y x X rows and columns of tokens.
"""

import math
from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from common.attention import position_entropy
from common.modules.added_gradient import add_gradient

from ..layers.attention import attention_layer, take_options
from ..layers.grid import check_layers, tell_grid
from ..layers.images import ImageSize, check_img_size
from ._build import build, check_global_pool, refuse_arguments
from ._default_cfg import untrained_cfg
from ._registry import register_once
from ._vision_transformer import CheckedVisionTransformer
from ._weights import fit_vision_transformer

__all__ = ["DaftConvVisionTransformer", "DaftFullVisionTransformer"]  # register_model appends every entry point


def flatten_map(self: nn.Module, input: tuple[Tensor], output: Tensor) -> Tensor:
    """A hook after the last normalisation: a map (B, Y, X, C) -> tokens (B, N, C), as timm's features are."""
    return output.flatten(1, -2)


class DaftVisionTransformer(CheckedVisionTransformer):
    """Base class of both kinds of DAFT: timm's ``VisionTransformer`` with their common parts."""

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's parameters, and the position biases and filters."""
        return super().no_weight_decay() | self.position_parameters()

    @torch.jit.ignore
    def position_parameters(self) -> set[str]:
        """Names of the parameters inside of DAFT: position biases or filters."""
        return {name for name, _ in self.named_parameters() if ".attn.attention." in name}


class DaftFullVisionTransformer(DaftVisionTransformer):
    """timm's ``VisionTransformer`` with DAFT-full, O(N² C) without attention maps; images of one size.

    Args:
        img_size, patch_size, num_heads, class_token, reg_tokens, global_pool: as in timm; heads have no meaning here.
        bias_dim, query: options of the mechanism, as in ``common.attention.DaftFullAttention.Options``.
        kwargs: all other arguments of timm's, except those for parts that this model replaces.

    Raises:
        ValueError: an invalid argument; an image of another size than the model's.
    """

    mechanism = "daft_full"

    def __init__(
        self,
        img_size: ImageSize = 224,
        patch_size: ImageSize = 16,
        *,
        class_token: bool = True,
        reg_tokens: int = 0,
        global_pool: str = "token",
        **kwargs: Any,
    ) -> None:
        check_global_pool(global_pool, class_token)
        fixed = {"dynamic_img_size": False, "dynamic_img_pad": False, "patch_drop_rate": 0.0, "qk_norm": False}
        refuse_arguments(kwargs, fixed, "DAFT-full")
        size, patch = check_img_size(img_size, patch_size, False), to_2tuple(patch_size)
        tokens = (size[0] // patch[0]) * (size[1] // patch[1]) + reg_tokens + int(class_token)
        options = take_options(self.mechanism, kwargs)
        super().__init__(
            size,
            patch_size,
            class_token=class_token,
            reg_tokens=reg_tokens,
            global_pool=global_pool,
            attn_layer=attention_layer(self.mechanism, max_tokens=tokens, **options),
            **kwargs,
        )

    @torch.jit.ignore
    def set_input_size(self, img_size: ImageSize | None = None, patch_size: ImageSize | None = None) -> None:
        """Change the image or patch size; positions, their biases and patches are resampled.

        Raises:
            ValueError: as when building a model of that size.
        """
        tell_grid(self)  # records the current grid, without changes
        patch = patch_size or self.patch_embed.patch_size
        (height, width), patch = check_img_size(img_size or self.patch_embed.img_size, patch, False), to_2tuple(patch)
        check_layers(self, (height // patch[0], width // patch[1]))
        super().set_input_size(img_size, patch_size)
        tell_grid(self)


class DaftConvVisionTransformer(DaftVisionTransformer):
    """timm's ``VisionTransformer`` with DAFT-conv, O(N C window), for images of any size with the same weights.

    It has neither class token nor position embedding: positions are in the filters, and ``global_pool`` is "avg" by
    default. Tokens pass the blocks as maps (B, Y, X, C); features are (B, N, C) as in timm.

    Args:
        img_size, patch_size: as in timm; ``img_size`` is used to measure and export the model, and is no limit.
        num_heads: h; each has one key per token and one filter.
        window, query and others: options of the mechanism, as in ``common.attention.DaftConvAttention.Options``.
        entropy_weight: factor of the entropy of the filters, which training then keeps small (Eq. 10); 0.001 in the
            paper. Its gradient reaches any trainer's loss; float16 training is refused with it.
        global_pool, fc_norm, dynamic_img_pad: as in timm; by default the mean of normalised tokens.
        kwargs: all other arguments of timm's, except those for parts that this model replaces or lacks.

    Raises:
        ValueError: an invalid argument; an image that is not whole patches, unless
            ``dynamic_img_pad``.
    """

    mechanism = "daft_conv"

    def __init__(
        self,
        img_size: ImageSize = 224,
        patch_size: ImageSize = 16,
        *,
        entropy_weight: float = 0.0,
        global_pool: str = "avg",
        fc_norm: bool = False,
        dynamic_img_pad: bool = False,
        **kwargs: Any,
    ) -> None:
        fixed = {"class_token": False, "pos_embed": "none", "dynamic_img_size": True}
        without = {
            "reg_tokens": 0,
            "no_embed_class": False,
            "pool_include_prefix": False,
            "patch_drop_rate": 0.0,
            "pos_drop_rate": 0.0,
        }
        refuse_arguments(kwargs, {**fixed, **without}, "DAFT-conv")
        check_img_size(img_size, patch_size, dynamic_img_pad)
        check_global_pool(global_pool, False)
        if not isinstance(entropy_weight, (int, float)) or not 0.0 <= entropy_weight < math.inf:
            raise ValueError(f"entropy_weight is {entropy_weight!r}; allowed: a number of at least 0")
        options = take_options(self.mechanism, kwargs)
        super().__init__(
            img_size,
            patch_size,
            global_pool=global_pool,
            fc_norm=fc_norm,
            dynamic_img_pad=dynamic_img_pad,
            attn_layer=attention_layer(self.mechanism, **options),
            **{**kwargs, **fixed},
        )
        self.entropy_weight = entropy_weight
        self.norm.register_forward_hook(flatten_map)

    @torch.jit.ignore
    def auxiliary_loss(self) -> Tensor | None:
        """``entropy_weight`` · the sum of Eq. 10, for logging; None if the factor is 0.

        Every backward pass in training mode already includes its gradient, so do not add it to a loss. A training loop
        that scales its loss builds the model with ``entropy_weight=0`` and adds
        ``0.001 * common.attention.position_entropy(model)`` before scaling; see ``add_gradient``.
        """
        return self.entropy_weight * position_entropy(self) if self.entropy_weight > 0.0 else None

    @torch.jit.unused
    def _regularised(self, x: Tensor) -> Tensor:
        return add_gradient(x, self.auxiliary_loss())

    @torch.jit.ignore
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Raises ValueError: timm can read JAX files only for softmax attention."""
        raise ValueError(
            f"the checkpoint {checkpoint_path!r} is of JAX; allowed for DAFT-conv: of torch, such as the state dict "
            "of a vision transformer of timm that has read it"
        )

    def _pos_embed(self, x: Tensor) -> Tensor:
        """timm's hook between patches and blocks: maps (B, Y, X, C) are not changed."""
        return self._regularised(x) if self.training and self.entropy_weight > 0.0 else x

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As timm's; "NLC" and the final features are (B, N, C), of the maps (B, Y, X, C) between the blocks."""
        features_of_maps = super().forward_intermediates(
            x, indices, return_prefix_tokens, norm, stop_early, output_fmt, intermediates_only, **kwargs
        )

        def tokens(features: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
            if isinstance(features, Tensor):
                return features.flatten(1, -2)  # the last normalisation has returned tokens
            return [tokens(feature) for feature in features] if output_fmt == "NLC" else features

        if isinstance(features_of_maps, dict):
            return {name: tokens(features) for name, features in features_of_maps.items()}
        if intermediates_only:
            return tokens(features_of_maps)
        return tuple(tokens(features) for features in features_of_maps)

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As timm's; a normalisation that is removed still makes tokens of a map."""
        take = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_norm:
            self.norm.register_forward_hook(flatten_map)
        return take


_PAPER = {"paper_ids": None, "paper_name": "A Dot Product Attention Free Transformer"}
_ANY_SIZE = {**_PAPER, "fixed_input_size": False}

default_cfgs = generate_default_cfgs(
    {
        "daft_full_s.untrained": untrained_cfg(**_PAPER),
        "daft_conv_s.untrained": untrained_cfg(**_ANY_SIZE),
        "daft_conv_s_h16.untrained": untrained_cfg(**_ANY_SIZE),
        "daft_conv_b_384.untrained": untrained_cfg(**_ANY_SIZE, input_size=(3, 384, 384), crop_pct=1.0),
        "daft_conv_test.untrained": untrained_cfg(**_ANY_SIZE, input_size=(3, 64, 64)),
    }
)


_create_full = partial(build, DaftFullVisionTransformer, fit_vision_transformer)
_create_conv = partial(build, DaftConvVisionTransformer, partial(fit_vision_transformer, values_only=True))


@register_once
def daft_full_s(pretrained: bool = False, **kwargs: Any) -> DaftFullVisionTransformer:
    """DAFT-full of DeiT-S's shape, biases of width 128: 22.7 M parameters; the paper: 22.6 M, top-1 79.8."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _create_full("daft_full_s", pretrained, **dict(model_args, **kwargs))


@register_once
def daft_conv_s(pretrained: bool = False, **kwargs: Any) -> DaftConvVisionTransformer:
    """DAFT-conv of DeiT-S's shape, 384 heads, window 11; the paper: 23.0 M, top-1 80.8."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=384)
    return _create_conv("daft_conv_s", pretrained, **dict(model_args, **kwargs))


@register_once
def daft_conv_s_h16(pretrained: bool = False, **kwargs: Any) -> DaftConvVisionTransformer:
    """DAFT-conv of DeiT-S's shape, 16 heads, window 11; the paper: 20.3 M, top-1 80.2."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=16)
    return _create_conv("daft_conv_s_h16", pretrained, **dict(model_args, **kwargs))


@register_once
def daft_conv_b_384(pretrained: bool = False, **kwargs: Any) -> DaftConvVisionTransformer:
    """DAFT-conv of DeiT-B's shape at 384 x 384, 32 heads, window 25; the paper: 79.7 M, top-1 83.4 from DeiT-B."""
    model_args = dict(img_size=384, patch_size=16, embed_dim=768, depth=12, num_heads=32, window=25)
    return _create_conv("daft_conv_b_384", pretrained, **dict(model_args, **kwargs))


@register_once
def daft_conv_test(pretrained: bool = False, **kwargs: Any) -> DaftConvVisionTransformer:
    """DAFT-conv as small as it goes, for tests; not in the paper."""
    model_args = dict(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, window=5)
    return _create_conv("daft_conv_test", pretrained, **dict(model_args, **kwargs))
