"""DAFT for images: attention-free vision transformers of DeiT's shape.

*A Dot Product Attention Free Transformer*, Tables 2 and 7: DAFT-full with DeiT's class token and position embedding,
DAFT-conv without either, for images of any size. Legend: B batch, C channels, Y x X rows and columns of tokens.
"""

import math
from functools import partial
from typing import Any, Dict, List, Optional, Set, Tuple, Union

import torch
from timm.layers import PatchEmbed
from timm.models import generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as stock_filter_fn
from torch import Tensor

from common.attention import position_entropy

from .blocks import LinearTimeBlock
from .checkpoints import source_grid, unwrapped
from .daft_attention import DaftConvSelfAttention, DaftFullSelfAttention, resample_position_bias
from .default_cfg import untrained_cfg
from .images import ImageSize, check_image, check_img_size
from .loading import Adapted, CheckedLoading, build
from .registry import register_once
from .scripting import renamed
from .starting_points import is_stock, start_conv, start_same_shape

__all__ = ["DaftConvVisionTransformer", "DaftFullVisionTransformer"]  # register_model appends every entry point


class CheckedPatchEmbed(PatchEmbed):
    """timm's ``PatchEmbed``, which says what is wrong with an image in a ValueError."""

    embed = renamed(PatchEmbed.forward, "embed")

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, height, width) -> (B, N, C), or (B, Y, X, C) for images of any size."""
        x = check_image(
            x, self.proj.in_channels, self.img_size, self.patch_size, not self.strict_img_size, self.dynamic_img_pad
        )
        return self.embed(x)


def _refuse(given: Dict[str, Any], allowed: Dict[str, Any], model: str) -> None:
    """Raise ValueError for arguments of timm's ``VisionTransformer`` that are ``given`` and not as ``allowed``."""
    for name in ("attn_layer", "block_fn", "embed_layer"):
        if name in given:
            raise ValueError(f"{name} is {given[name]!r}; allowed for {model}: not given, it has its own")
    for name, value in allowed.items():
        if name in given and given[name] != value:
            raise ValueError(f"{name} is {given[name]!r}; allowed for {model}: {value!r}")


def _check_global_pool(global_pool: str, class_token: bool) -> None:
    if global_pool == "token" and not class_token:
        raise ValueError("global_pool is 'token'; allowed without a class token: '', 'avg' and timm's others")


class DaftVisionTransformer(CheckedLoading, VisionTransformer):
    """What both kinds of DAFT do alike with timm's ``VisionTransformer``."""

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        """timm's, and the position biases and filters."""
        return super().no_weight_decay() | self.position_parameters()

    @torch.jit.ignore
    def position_parameters(self) -> Set[str]:
        """Names of the parameters inside of DAFT: position biases or filters."""
        return {name for name, _ in self.named_parameters() if ".attn.attention." in name}

    @torch.jit.ignore
    def set_input_size(self, img_size: Optional[ImageSize] = None, patch_size: Optional[ImageSize] = None) -> None:
        """Make the model one for another patch size, resampling patches, and for images of another size.

        Raises:
            ValueError: as when building a model of that size.
        """
        embed = self.patch_embed
        check_img_size(img_size or embed.img_size, patch_size or embed.patch_size, embed.dynamic_img_pad)
        super().set_input_size(img_size, patch_size)


class DaftFullVisionTransformer(DaftVisionTransformer):
    """timm's ``VisionTransformer`` with DAFT-full, O(N² C) without attention maps; images of one size.

    Args:
        img_size, patch_size, num_heads, class_token, reg_tokens, global_pool: as in timm; heads have no meaning here.
        bias_dim: width n of the factors of the position bias (Eq. 6), 0 for a free matrix (Table 6).
        query: False leaves the gate by queries out (Table 8).
        kwargs: every other argument of timm's, but those that name a part this model has its own of.

    Raises:
        ValueError: an argument that is none of the above; an image of another size than the model's.
    """

    def __init__(
        self,
        img_size: ImageSize = 224,
        patch_size: ImageSize = 16,
        *,
        bias_dim: int = 128,
        query: bool = True,
        class_token: bool = True,
        reg_tokens: int = 0,
        global_pool: str = "token",
        **kwargs: Any,
    ) -> None:
        _check_global_pool(global_pool, class_token)
        _refuse(kwargs, {"dynamic_img_size": False, "dynamic_img_pad": False, "patch_drop_rate": 0.0}, "DAFT-full")
        size, patch = check_img_size(img_size, patch_size, False), _pair(patch_size)
        tokens = (size[0] // patch[0]) * (size[1] // patch[1]) + reg_tokens + int(class_token)
        options = {"max_tokens": tokens, "bias_dim": bias_dim or None, "query": query}
        super().__init__(
            size, patch_size, class_token=class_token, reg_tokens=reg_tokens, global_pool=global_pool,
            embed_layer=CheckedPatchEmbed, attn_layer=DaftFullSelfAttention,
            block_fn=partial(LinearTimeBlock, attention_options=options), **kwargs,
        )  # fmt: skip

    def adapt_foreign(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        """A stock vision transformer's state dict with position biases of this model; any other as it is."""
        return start_same_shape(state_dict, self) if is_stock(state_dict) else state_dict

    @torch.jit.ignore
    def set_input_size(self, img_size: Optional[ImageSize] = None, patch_size: Optional[ImageSize] = None) -> None:
        """Make the model one for another image or patch size, resampling positions, their biases and patches.

        Raises:
            ValueError: as when building a model of that size.
        """
        old = self.patch_embed.grid_size
        super().set_input_size(img_size, patch_size)
        for block in self.blocks:
            block.attn.set_grid_size(self.patch_embed.grid_size, old, self.num_prefix_tokens)


class DaftConvVisionTransformer(DaftVisionTransformer):
    """timm's ``VisionTransformer`` with DAFT-conv, O(N C window), for images of any size with the same weights.

    There is neither class token nor position embedding: positions are in the filters, and ``global_pool`` is "avg"
    unless given. Tokens pass the blocks as maps (B, Y, X, C); features are (B, N, C) as in timm.

    Args:
        img_size, patch_size: as in timm; the first is what the model is measured and exported with, no limit.
        num_heads: h; each has one key per token and one filter.
        window: side of the filters, or (height, width); odd.
        query: False leaves the gate by queries out (Table 8).
        local_only: nothing outside of the window is seen (Figure 2).
        reparameterize: False for filters that are not standardised and scaled (Table 7).
        gumbel_temperature: each head selects one neighbour (Eq. 11); 0.5 in the paper, None for none.
        entropy_weight: factor of ``auxiliary_loss``; 0.001 in the paper (Eq. 10).
        global_pool, fc_norm, dynamic_img_pad: as in timm, the mean of normalised tokens unless given.
        kwargs: every other argument of timm's, but those that name a part this model has its own of, or none.

    Raises:
        ValueError: an argument that is none of the above; an image that is not whole patches, unless
            ``dynamic_img_pad``.
    """

    def __init__(
        self,
        img_size: ImageSize = 224,
        patch_size: ImageSize = 16,
        *,
        window: Union[int, Tuple[int, int]] = 11,
        query: bool = True,
        local_only: bool = False,
        reparameterize: bool = True,
        gumbel_temperature: Optional[float] = None,
        entropy_weight: float = 0.0,
        global_pool: str = "avg",
        fc_norm: bool = False,
        dynamic_img_pad: bool = False,
        **kwargs: Any,
    ) -> None:
        fixed = {"class_token": False, "pos_embed": "none", "dynamic_img_size": True}
        without = {
            "reg_tokens": 0, "no_embed_class": False, "pool_include_prefix": False,
            "patch_drop_rate": 0.0, "pos_drop_rate": 0.0,
        }  # fmt: skip
        _refuse(kwargs, {**fixed, **without}, "DAFT-conv")
        check_img_size(img_size, patch_size, dynamic_img_pad)
        _check_global_pool(global_pool, False)
        if not isinstance(entropy_weight, (int, float)) or not 0.0 <= entropy_weight < math.inf:
            raise ValueError(f"entropy_weight is {entropy_weight!r}; allowed: a number of at least 0")
        options = {
            "window": window, "query": query, "local_only": local_only, "reparameterize": reparameterize,
            "gumbel_temperature": gumbel_temperature,
        }  # fmt: skip
        super().__init__(
            img_size, patch_size, global_pool=global_pool, fc_norm=fc_norm, dynamic_img_pad=dynamic_img_pad,
            embed_layer=CheckedPatchEmbed, attn_layer=DaftConvSelfAttention,
            block_fn=partial(LinearTimeBlock, attention_options=options), **{**kwargs, **fixed},
        )  # fmt: skip
        self.entropy_weight = entropy_weight

    @torch.jit.ignore
    def auxiliary_loss(self) -> Optional[Tensor]:
        """What the loss of training has beside the classification: ``entropy_weight`` · Eq. 10's sum; None if 0.

        timm's training tasks, and so its train.py, add it by themselves once ``timm_plugin`` is imported.
        """
        return self.entropy_weight * position_entropy(self) if self.entropy_weight > 0.0 else None

    def adapt_foreign(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        """A stock vision transformer's state dict by the paper's procedure; any other as it is."""
        return start_conv(state_dict, self) if is_stock(state_dict) else state_dict

    @torch.jit.ignore
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Refused with a ValueError: timm's reading of JAX's files knows softmax attention alone."""
        raise ValueError(
            f"the checkpoint {checkpoint_path!r} is of JAX; allowed for DAFT-conv: of torch, such as the state dict "
            "of a vision transformer of timm that has read it"
        )

    forward_maps = renamed(VisionTransformer.forward_features, "forward_maps")

    def forward_features(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        """x (B, in_chans, height, width) -> (B, N, C), normalised, not pooled."""
        return self.forward_maps(x, attn_mask, is_causal).flatten(1, 2)

    def _pos_embed(self, x: Tensor) -> Tensor:
        """timm's hook between patches and blocks: maps (B, Y, X, C) stay what they are."""
        return x

    @torch.jit.ignore
    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[Union[int, List[int]]] = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As timm's; "NLC" and the final features are (B, N, C), of the maps (B, Y, X, C) between the blocks."""
        found = super().forward_intermediates(
            x, indices, return_prefix_tokens, norm, stop_early, output_fmt, intermediates_only, **kwargs
        )

        def tokens(features: Union[Tensor, List[Tensor]]) -> Union[Tensor, List[Tensor]]:
            if isinstance(features, Tensor):
                return features.flatten(1, 2)
            return [tokens(feature) for feature in features] if output_fmt == "NLC" else features

        if isinstance(found, dict):
            return {name: tokens(features) for name, features in found.items()}
        return tokens(found) if intermediates_only else tuple(tokens(features) for features in found)


def _pair(size: ImageSize) -> Tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def full_filter_fn(state_dict: Dict[str, Any], model: DaftFullVisionTransformer) -> Adapted:
    """The state dict ``model`` can load: as timm's for vision transformers, and position biases resampled or new.

    Raises:
        ValueError: the biases belong to no grid that could be told from their number or the checkpoint's
            ``input_size``.
    """
    state_dict = unwrapped(state_dict)
    if is_stock(state_dict):
        return start_same_shape(state_dict, model)
    patches = state_dict.get("patch_embed.proj.weight")
    patch_size = model.patch_embed.patch_size if patches is None else tuple(patches.shape[-2:])
    new, prefix = model.patch_embed.grid_size, model.num_prefix_tokens
    biases = {name: state_dict[name] for name in model.position_parameters() if name in state_dict}
    for name, bias in biases.items():
        old = source_grid(bias.shape[0] - prefix, patch_size, model)
        biases[name] = resample_position_bias(name.rsplit(".", 1)[1], bias, new, old, prefix)
    return Adapted({**stock_filter_fn(state_dict, model), **biases})


def conv_filter_fn(state_dict: Dict[str, Any], model: DaftConvVisionTransformer) -> Adapted:
    """The state dict ``model`` can load: as timm's for vision transformers, a stock one by the paper's procedure."""
    state_dict = unwrapped(state_dict)
    return start_conv(state_dict, model) if is_stock(state_dict) else Adapted(stock_filter_fn(state_dict, model))


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


def _create(model: type, filter_fn: Any, variant: str, pretrained: bool, **kwargs: Any) -> VisionTransformer:
    out_indices = kwargs.pop("out_indices", 3)
    return build(
        model, variant, pretrained, pretrained_filter_fn=filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"), **kwargs,
    )  # fmt: skip


_create_full = partial(_create, DaftFullVisionTransformer, full_filter_fn)
_create_conv = partial(_create, DaftConvVisionTransformer, conv_filter_fn)


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
