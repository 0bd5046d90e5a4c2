"""The hierarchical Flowformer for images.

Wu, Wu, Xu, Wang, Long, *Flowformer: Linearizing Transformers with Conservation Flows*, ICML 2022, Table 8: four stages
of pre-norm Flow-Attention blocks on ever coarser maps. Linear attention makes the 3136 tokens of the first stage
affordable.
Legend: B batch, C channels, H x W the size of a map, N = H W tokens.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from timm.layers import (
    ClassifierHead,
    LayerNorm,
    PatchEmbed,
    calculate_drop_path_rates,
    get_act_layer,
    get_norm_layer,
    to_2tuple,
    to_ntuple,
)
from timm.layers.typing import LayerType
from timm.models import checkpoint_seq, generate_default_cfgs, named_apply
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models.vision_transformer import init_weights_vit_timm
from torch import Tensor, nn
from torch.nn import functional as F

from common.ops.shared.checks import check_choice, check_positive_int

from ..layers.block import MlpScaleBlock
from ..layers.grid import set_grid_of_neighbours, set_stage_grids, stage_grids
from ..layers.images import ImageSize, PositionEmbedding, check_image, check_img_size
from ..layers.layer_spec import LayerSpec, check_attn_layer, mechanisms_in, option_names, stage_layers
from ..layers.position_bias import Grid
from ._build import StrictLoading, arguments_of, build, check_names
from ._default_cfg import packaged_file, untrained_cfg
from ._registry import register_once
from ._weights import fit_hierarchical

__all__ = ["Flowformer"]  # register_model appends every entry point

#: The paper's Table 8, without its 16 heads. The table prints 786 channels for the last stage, the text 768.
TABLE_8 = {"embed_dims": (96, 192, 384, 768), "depths": (3, 3, 10, 3)}
GLOBAL_POOLS = ("", "avg", "max", "avgmax", "catavgmax")


class Downsample(nn.Module):
    """The 2x2 convolution with stride 2 between stages; an odd H or W gets a row or column of zeros."""

    def __init__(self, dim: int, dim_out: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.proj = nn.Conv2d(dim, dim_out, kernel_size=2, stride=2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', ceil(H / 2), ceil(W / 2))."""
        # There is no condition, so that an exported model accepts any size. Even sizes are not padded.
        x = F.pad(x, [0, x.shape[3] % 2, 0, x.shape[2] % 2])
        return self.proj(x)


class FlowformerStage(nn.Module):
    """Blocks at one resolution, on a map before and after: (B, C, H, W) -> (B, C', H', W').

    The blocks see tokens (B, N, C), or with ``keeps_map`` a map (B, H, W, C), for attention that reads the grid.
    """

    keeps_map: Final[bool] = False

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module], keeps_map: bool = False) -> None:
        super().__init__()
        self.keeps_map = keeps_map
        self.grad_checkpointing = False
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, C', H', W'), halved where the stage has a downsampling."""
        x = self.downsample(x)
        B, C, H, W = x.shape
        # (B, C, H, W) -> (B, H, W, C) or (B, N, C)
        x = x.permute(0, 2, 3, 1) if self.keeps_map else x.flatten(2).transpose(1, 2)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        if self.keeps_map:
            return x.permute(0, 3, 1, 2)  # (B, H, W, C) -> (B, C, H, W)
        return x.transpose(1, 2).reshape(B, C, H, W)  # (B, N, C) -> (B, C, H, W)


class Flowformer(StrictLoading, nn.Module):
    """Hierarchical vision transformer with Flow-Attention, O(N C d) per block, with timm's full model interface.

    With another ``attn_layer`` it is a row of the paper's Table 5. Each stage's attention knows the grid of its tokens.

    Images are (B, in_chans, H, W); features are maps (B, C, H / 32, W / 32), rounded up, for four stages.

    Args:
        img_size: height and width, or one number for both.
        patch_size: side of the stem's patches.
        in_chans: channels of the images.
        num_classes: outputs of the classifier, 0 for no classifier.
        global_pool: "avg", "max", "avgmax", "catavgmax", or "" for unpooled maps.
        embed_dims, depths: channels and number of blocks of every stage.
        num_heads, mlp_ratio: one value, or one per stage.
        qkv_bias, qk_norm, proj_drop_rate, attn_drop_rate, norm_layer, act_layer: as in timm's blocks.
        init_values: initial value of timm's layer scale on both branches; None for no scale.
        mlp_init_values: initial value of a layer scale only on the MLP branch.
        attn_layer: "flow", another name or class that timm's vision transformers accept, or a pattern of names that
            repeats over the stages, such as "flow*3,softmax".
        options: options of the mechanism, such as ``form`` and ``clamp``: one value or one per stage, None for the
            default; see ``common.attention.FlowAttention.Options``. In a pattern, an option applies to every mechanism
            that has it. SOFT's ``ratio`` is by default 8, 4, 2 and 1, as its authors have it.
        dynamic_img_size: accept images of any size that is a multiple of ``patch_size``, resampling the position
            embedding to each; not with attention that stores something for each position, such as cosFormer's.
        dynamic_img_pad: pad images to a multiple of ``patch_size`` with zeros. (Maps of odd size are always padded
            between stages.)
        drop_rate, pos_drop_rate, drop_path_rate: dropout before the classifier and after the position embedding,
            stochastic depth, rising linearly from block to block.

    Raises:
        ValueError: an invalid argument; an image of another size than the model's.
    """

    dynamic_img_size: Final[bool]
    dynamic_img_pad: Final[bool]

    def __init__(
        self,
        img_size: ImageSize = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (96, 192, 384, 768),
        depths: Sequence[int] = (3, 3, 10, 3),
        num_heads: int | Sequence[int] = 16,
        mlp_ratio: float | Sequence[float] = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        mlp_init_values: float | None = None,
        attn_layer: LayerType = "flow",
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: LayerType | None = None,
        act_layer: LayerType = nn.GELU,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        _check_arguments(patch_size, in_chans, num_classes, global_pool, embed_dims, depths)
        _check_numbers(depths, num_heads, mlp_ratio)
        _check_rates(drop_rate=drop_rate, pos_drop_rate=pos_drop_rate, proj_drop_rate=proj_drop_rate)
        _check_rates(attn_drop_rate=attn_drop_rate, drop_path_rate=drop_path_rate)
        check_attn_layer(attn_layer)
        check_names(type(self).__name__, options, arguments_of(type(self)) | option_names(attn_layer))
        img_size = check_img_size(img_size, patch_size, dynamic_img_pad)
        norm_layer = _layer("norm_layer", norm_layer, get_norm_layer) or LayerNorm
        act_layer = _layer("act_layer", act_layer, get_act_layer)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.dynamic_img_size = dynamic_img_size
        self.dynamic_img_pad = dynamic_img_pad
        self.num_features = self.embed_dim = embed_dims[-1]
        self.feature_info = [
            dict(module=f"stages.{i}", num_chs=dim, reduction=patch_size * 2**i) for i, dim in enumerate(embed_dims)
        ]

        self.patch_embed = PatchEmbed(
            img_size,
            patch_size,
            in_chans,
            embed_dims[0],
            flatten=False,
            strict_img_size=not dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **dd,
        )
        grid_size = self.patch_embed.dynamic_feat_size(img_size)
        grids = stage_grids(grid_size, len(depths))
        layers = stage_layers(LayerSpec(attn_layer, options), grids, dynamic_img_size)
        self.pos_embed = PositionEmbedding(grid_size, embed_dims[0], pos_drop_rate, dynamic_img_size, **dd)
        block = partial(
            MlpScaleBlock,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            init_values=init_values,
            mlp_init_values=mlp_init_values,
            proj_drop=proj_drop_rate,
            attn_drop=attn_drop_rate,
            norm_layer=norm_layer,
            act_layer=act_layer,
            **dd,
        )
        sizes = (embed_dims, depths, num_heads, mlp_ratio, drop_path_rate)
        self.stages = nn.Sequential(*_stages(block, layers, grids, *sizes, dd))
        self.norm = norm_layer(self.num_features, **dd)
        self.head = ClassifierHead(self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate, **dd)
        self.head_hidden_size = self.num_features * self.head.global_pool.feat_mult()
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Draw new weights as timm does; without ``needs_reset``, only those that their layers draw differently."""
        named_apply(partial(init_weights_vit_timm, needs_reset=needs_reset), self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, in addition to the biases and scales that timm excludes."""
        return {"pos_embed.weight"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of parameter names by depth, for layer-wise learning rates: by block, or by stage if ``coarse``."""
        by_block = [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return dict(stem=r"^patch_embed|^pos_embed", blocks=r"^stages\.(\d+)" if coarse else by_block)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass instead of keeping its activations."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head.fc

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Set a new classifier for ``num_classes``, 0 for no classifier, and another pooling unless it is None."""
        pool = self.global_pool if global_pool is None else global_pool
        check_choice("global_pool", pool, GLOBAL_POOLS)
        _check_num_classes(num_classes)
        self.num_classes = num_classes
        self.global_pool = pool
        weight = self.pos_embed.weight
        head = ClassifierHead(
            self.num_features,
            num_classes,
            pool_type=pool,
            drop_rate=self.head.drop.p,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.head = head.train(self.training)
        self.head_hidden_size = self.num_features * head.global_pool.feat_mult()

    @torch.jit.ignore
    def set_input_size(self, img_size: ImageSize | None = None, patch_size: int | None = None) -> None:
        """Change the image or patch size; positions and patches are resampled. None keeps a size.

        Attention that stores something for each position is changed as by ``timm_plugin.tell_grid``: make the optimiser
        after that.

        Raises:
            ValueError: as when building a model of that size; attention whose weights per position cannot be resampled.
        """
        new_patch = self.patch_embed.patch_size if patch_size is None else patch_size
        new_size = check_img_size(img_size or self.patch_embed.img_size, new_patch, self.dynamic_img_pad)
        grid_size = tuple(math.ceil(side / patch) for side, patch in zip(new_size, to_2tuple(new_patch)))
        grids = stage_grids(grid_size, len(self.stages))
        set_stage_grids(self.stages, grids)
        self.patch_embed.set_input_size(img_size=new_size, patch_size=patch_size)
        self.pos_embed.set_grid_size(grid_size)
        for i, info in enumerate(self.feature_info):
            info["reduction"] = self.patch_embed.feat_ratio() * 2**i
        update_model_input_size(self, new_size, patch_size=patch_size)

    @torch.jit.ignore
    def stage_layers(self, spec: LayerSpec) -> list[LayerType]:
        """The attention of each stage for ``spec``, as if this model were built with it.

        Raises:
            ValueError: as when building a model with it.
        """
        return stage_layers(spec, self._grids(), self.dynamic_img_size)

    @torch.jit.ignore
    def set_grid_of_neighbours(self) -> None:
        """Set the grid in attention that sees neighbours; call it after attention was replaced."""
        for stage, grid in zip(self.stages, self._grids()):
            stage.keeps_map = set_grid_of_neighbours(stage.blocks, grid)

    def _grids(self) -> list[Grid]:
        """(Y, X) of each stage's tokens, for images of the model's own size."""
        return stage_grids(self.patch_embed.dynamic_feat_size(self.patch_embed.img_size), len(self.stages))

    def _stem(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, C, H / patch, W / patch), positions added."""
        x = check_image(
            x,
            self.in_chans,
            self.patch_embed.img_size,
            self.patch_embed.patch_size,
            self.dynamic_img_size,
            self.dynamic_img_pad,
        )
        return self.pos_embed(self.patch_embed(x))

    def _norm(self, x: Tensor) -> Tensor:
        """The last normalisation, over the channels of a map (B, C, H, W)."""
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward_features(self, x: Tensor) -> Tensor:
        """x (B, in_chans, H, W) -> (B, C, H / 32, W / 32), normalised, not pooled."""
        return self._norm(self.stages(self._stem(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """x (B, C, H', W') -> logits (B, num_classes), or (B, C) before the classifier if ``pre_logits``."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, in_chans, H, W) -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """``forward_features`` and the map after every stage, as (final, maps) or only the maps.

        Args:
            indices: the last n stages if an int, all if None, else these stages, from the end if negative.
            norm: apply the last normalisation to the last stage's map as well.
            stop_early: skip the stages after the last requested one.
            output_fmt: "NCHW".
            intermediates_only: return only the maps.

        Raises:
            ValueError: another ``output_fmt``.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt}; allowed: NCHW")
        maps: list[Tensor] = []
        last = len(self.feature_info) - 1
        take, max_index = feature_take_indices(len(self.stages), indices)
        x = self._stem(x)
        stages = self.stages
        if not torch.jit.is_scripting() and stop_early:
            stages = stages[: max_index + 1]
        reached = -1
        for i, stage in enumerate(stages):
            x = stage(x)
            reached = i
            if i in take:
                maps.append(self._norm(x) if norm and i == last else x)
        if intermediates_only:
            return maps
        # The last normalisation has the last stage's channels.
        return (self._norm(x) if reached == last else x), maps

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove stages that ``indices`` do not need, and optionally the normalisation and the head.

        Returns:
            the indices, counted from the first stage.
        """
        take, max_index = feature_take_indices(len(self.stages), indices)
        shortened = max_index < len(self.stages) - 1
        self.stages = self.stages[: max_index + 1]
        if shortened:
            self.num_features = self.feature_info[max_index]["num_chs"]
        if prune_norm or shortened:
            self.norm = nn.Identity()
        if prune_head or shortened:
            self.reset_classifier(0, "")
        return take


def _stages(
    block: Callable[..., nn.Module],
    layers: Sequence[LayerType],
    grids: Sequence[tuple[int, int]],
    embed_dims: Sequence[int],
    depths: Sequence[int],
    num_heads: int | Sequence[int],
    mlp_ratio: float | Sequence[float],
    drop_path_rate: float,
    dd: dict[str, Any],
) -> list[FlowformerStage]:
    """The stages: ``depths[i]`` blocks of ``embed_dims[i]`` channels, after a downsampling except in the first stage.

    The blocks of stage i have the attention ``layers[i]``, and their tokens lie on ``grids[i]``.
    """
    heads, ratios = to_ntuple(len(depths))(num_heads), to_ntuple(len(depths))(mlp_ratio)
    rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
    stages = []
    for i, dim in enumerate(embed_dims):
        downsample = nn.Identity() if i == 0 else Downsample(embed_dims[i - 1], dim, **dd)
        block_args = dict(attn_layer=layers[i], mlp_ratio=ratios[i])
        blocks = [block(dim, heads[i], drop_path=rate, **block_args) for rate in rates[i]]
        stages.append(FlowformerStage(downsample, blocks, set_grid_of_neighbours(blocks, grids[i])))
    return stages


def _check_arguments(
    patch_size: int,
    in_chans: int,
    num_classes: int,
    global_pool: str,
    embed_dims: Sequence[int],
    depths: Sequence[int],
) -> None:
    check_positive_int("patch_size", patch_size)
    check_positive_int("in_chans", in_chans)
    _check_num_classes(num_classes)
    check_choice("global_pool", global_pool, GLOBAL_POOLS)
    listed = isinstance(depths, (list, tuple)) and isinstance(embed_dims, (list, tuple))
    if not listed or not depths or len(depths) != len(embed_dims):
        raise ValueError(f"depths is {depths} and embed_dims {embed_dims}; allowed: one number per stage in both")
    for depth in depths:
        check_positive_int("depths", depth)
    for dim in embed_dims:
        check_positive_int("embed_dims", dim)


def _check_numbers(depths: Sequence[int], num_heads: Any, mlp_ratio: Any) -> None:
    """Raise ValueError for heads and ratios that are no numbers, or not one for each stage."""
    heads, ratios = to_ntuple(len(depths))(num_heads), to_ntuple(len(depths))(mlp_ratio)
    if len(heads) != len(depths) or len(ratios) != len(depths):
        raise ValueError(f"num_heads is {num_heads} and mlp_ratio {mlp_ratio}; allowed: one or {len(depths)} values")
    for number in heads:
        check_positive_int("num_heads", number)
    if not all(isinstance(ratio, (int, float)) and ratio > 0 for ratio in ratios):
        raise ValueError(f"mlp_ratio is {mlp_ratio!r}; allowed: a number above 0, or one for each stage")


def _check_rates(**rates: Any) -> None:
    for name, rate in rates.items():
        if not isinstance(rate, (int, float)) or not 0.0 <= rate <= 1.0:
            raise ValueError(f"{name} is {rate!r}; allowed: a number from 0 to 1")


def _layer(argument: str, layer: LayerType | None, get: Callable) -> Any:
    """The class that ``layer`` names in timm's table, or ``layer`` itself; ValueError for an unknown name."""
    try:
        return get(layer)
    except KeyError as error:
        raise ValueError(f"{argument} is {layer!r}; allowed: a name that timm.layers knows, or a class") from error


def _check_num_classes(num_classes: int) -> None:
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
        raise ValueError(f"num_classes is {num_classes!r}; allowed: 0, for no classifier, or more")


#: The default configuration of a hierarchical model, with given differences.
hierarchical_cfg = partial(untrained_cfg, pool_size=(7, 7), classifier="head.fc")
_digits_cfg = partial(hierarchical_cfg, num_classes=10, input_size=(3, 32, 32), pool_size=(2, 2), crop_pct=1.0)

default_cfgs = generate_default_cfgs(
    {
        "flowformer_hier_s.untrained": hierarchical_cfg(),
        "flowformer_hier_s_12h.untrained": hierarchical_cfg(),
        "flowformer_hier_ti.untrained": hierarchical_cfg(),
        "flowformer_hier_digits.uci_digits": _digits_cfg(file=packaged_file("flowformer_hier_digits.uci_digits")),
        "flowformer_hier_digits.untrained": _digits_cfg(),
        "flowformer_hier_test.untrained": hierarchical_cfg(input_size=(3, 64, 64), pool_size=(2, 2)),
    }
)


def create_hierarchical(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """The model ``variant`` by timm's factory, with features of all stages unless ``out_indices`` says otherwise."""
    depths = kwargs.get("depths", (0,) * 4)
    stages = len(depths) if isinstance(depths, (list, tuple)) else 0  # the model refuses other types
    feature_cfg = dict(out_indices=kwargs.pop("out_indices", tuple(range(stages))), flatten_sequential=True)
    return build(Flowformer, fit_hierarchical, variant, pretrained, feature_cfg, **kwargs)


@register_once
def flowformer_hier_s(pretrained: bool = False, **kwargs: Any) -> Flowformer:
    """The paper's vision model (Table 8): 19 blocks in four stages, 16 heads, 43.3 M parameters; top-1 80.6 there."""
    model_args = dict(TABLE_8, num_heads=16)
    return create_hierarchical("flowformer_hier_s", pretrained, **dict(model_args, **kwargs))


@register_once
def flowformer_hier_s_12h(pretrained: bool = False, **kwargs: Any) -> Flowformer:
    """The vision model as its authors released it: 12 heads, layer scale 1e-5 on the MLP branch, drop path 0.2.

    Its flow attention has ``form="released_vision"``.
    """
    model_args: dict[str, Any] = dict(TABLE_8, num_heads=12, mlp_init_values=1e-5, drop_path_rate=0.2)
    if "flow" in mechanisms_in(kwargs.get("attn_layer", "flow")):
        model_args.update(form="released_vision", clamp=1.0)
    return create_hierarchical("flowformer_hier_s_12h", pretrained, **dict(model_args, **kwargs))


@register_once
def flowformer_hier_ti(pretrained: bool = False, **kwargs: Any) -> Flowformer:
    """A sibling with half the channels and 12 blocks for quick work; not in the paper."""
    model_args = dict(embed_dims=(48, 96, 192, 384), depths=(2, 2, 6, 2), num_heads=8)
    return create_hierarchical("flowformer_hier_ti", pretrained, **dict(model_args, **kwargs))


@register_once
def flowformer_hier_digits(pretrained: bool = False, **kwargs: Any) -> Flowformer:
    """Three stages for 32 x 32 images and 10 classes, trained in minutes without a GPU; not in the paper.

    ``pretrained=True`` loads weights that are part of the package and were trained on handwritten digits.
    """
    model_args = dict(embed_dims=(48, 96, 192), depths=(1, 2, 1), num_heads=4)
    return create_hierarchical("flowformer_hier_digits", pretrained, **dict(model_args, **kwargs))


@register_once
def flowformer_hier_test(pretrained: bool = False, **kwargs: Any) -> Flowformer:
    """Four stages, as small as possible, for tests; not in the paper."""
    model_args = dict(embed_dims=(16, 24, 32, 48), depths=(1, 1, 2, 1), num_heads=4)
    return create_hierarchical("flowformer_hier_test", pretrained, **dict(model_args, **kwargs))
