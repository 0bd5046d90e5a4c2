"""DeiT with Flow-Attention in place of softmax attention (Flowformer, ICML 2022; DeiT-S there: top-1 80.0).

Parameters are named as in timm's DeiT, so a stock ``deit_small_patch16_224`` state dict loads.
"""

from functools import partial
from typing import Any

from timm.layers.typing import LayerType
from timm.models import generate_default_cfgs
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

from ..layers.layer_spec import LayerSpec, check_attn_layer, check_stack, option_names
from ._build import StrictLoading, build
from ._default_cfg import untrained_cfg
from ._registry import register_once
from ._weights import fit_vision_transformer

__all__ = ["DistilledFlowVisionTransformer", "FlowVisionTransformer"]  # register_model appends every entry point


class FlowVisionTransformer(StrictLoading, VisionTransformer):
    """timm's ``VisionTransformer`` with all its arguments, and the options of the attention mechanism.

    Args:
        attn_layer: name or class of the attention, as in timm, or a pattern of names that repeats over the blocks,
            such as "flow*3,softmax".
        kwargs: options of the mechanism, such as ``form`` and ``clamp``, None for the default; see
            ``common.attention.FlowAttention.Options``. In a pattern, an option applies to every mechanism that has it.
            Other arguments are timm's.

    Raises:
        ValueError: an option that the mechanism does not have, or an invalid value; a pattern of more layers than
            there are blocks.
    """

    def __init__(
        self,
        *args: Any,
        attn_layer: LayerType = "flow",
        **kwargs: Any,
    ) -> None:
        options = {name: kwargs.pop(name) for name in option_names(attn_layer) & kwargs.keys()}
        check_attn_layer(attn_layer)
        layer = LayerSpec(attn_layer, options).without_defaults().layer_class()
        super().__init__(*args, attn_layer=layer, **kwargs)
        check_stack(layer, self)


class DistilledFlowVisionTransformer(FlowVisionTransformer, VisionTransformerDistilled):
    """timm's distilled ``VisionTransformer``, with a distillation token, a second classifier and the options above.

    In training, after ``set_distilled_training(True)``, as in timm's token distillation, the output is that of both
    classifiers; otherwise the output is their mean.
    """


default_cfgs = generate_default_cfgs(
    {
        "flowformer_deit_s.untrained": untrained_cfg(),
        "flowformer_deit_s_distilled.untrained": untrained_cfg(classifier=("head", "head_dist")),
        "flowformer_deit_ti.untrained": untrained_cfg(),
    }
)


_create = partial(build, FlowVisionTransformer, fit_vision_transformer)


@register_once
def flowformer_deit_s(pretrained: bool = False, **kwargs: Any) -> FlowVisionTransformer:
    """DeiT-S with Flow-Attention: 12 blocks of 384 channels and 6 heads, class token, 22 M parameters."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _create("flowformer_deit_s", pretrained, **dict(model_args, **kwargs))


@register_once
def flowformer_deit_s_distilled(pretrained: bool = False, **kwargs: Any) -> DistilledFlowVisionTransformer:
    """The row DeiT + Flowformer of the paper's Table 5: DeiT-S with token distillation, 22.4 M parameters; top-1 80.0.

    A stock ``deit_small_distilled_patch16_224`` state dict loads.
    """
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    create = partial(build, DistilledFlowVisionTransformer, fit_vision_transformer)
    return create("flowformer_deit_s_distilled", pretrained, **dict(model_args, **kwargs))


@register_once
def flowformer_deit_ti(pretrained: bool = False, **kwargs: Any) -> FlowVisionTransformer:
    """DeiT-Ti with Flow-Attention: 12 blocks of 192 channels and 3 heads, class token, 5.7 M parameters."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _create("flowformer_deit_ti", pretrained, **dict(model_args, **kwargs))
