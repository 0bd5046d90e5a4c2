"""timm's ``create_model`` for models with another attention, which raises if the model ignores ``attn_layer``."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers.typing import LayerType
from timm.models import create_model as timms_create_model
from timm.models.vision_transformer import ATTN_LAYERS
from torch import nn

from common.attention import ATTENTIONS

from .layers.attention import SelfAttention, attention_layer
from .layers.grid import check_given, fixed_grid, host_of_tokens, tell_grid
from .layers.stacks import check_attn_layer, check_stack, is_pattern, is_stack, stack
from .models._build import StrictLoading
from .models.flowformer import Flowformer
from .stored import store_where_possible


def create_model(model_name: str, *positional: Any, attn_layer: LayerType, **arguments: Any) -> nn.Module:
    """``timm.create_model(model_name, attn_layer=attn_layer, ...)`` of a model that does use ``attn_layer``.

    Some of timm's models take any argument of that name and do nothing with it; timm says nothing then. Layers that
    must know how many tokens there are, or on which grid they lie (``tell_grid``), are told; timm does not do that.

    Args:
        model_name: one of ``timm.list_models()``.
        attn_layer: a name in timm's table, which has ours; a class, such as ``attention_layer`` gives; or a pattern of
            our names that repeats over the blocks, from the first on, or over the stages of ``flowformer_hier_*``:
            "flow*3,softmax". timm's own ``create_model`` knows no patterns.
        positional, arguments: every other argument of timm's.

    Raises:
        ValueError: ``attn_layer`` is no name, class or pattern; a pattern of more layers than the model has; a model
            that does not take or does not use ``attn_layer``; a ``max_tokens`` or ``grid_size`` of the class that is
            not the model's; tokens that do not lie on one grid where the layer needs that.
    """
    given = attn_layer
    if attn_layer is not None:
        check_attn_layer(attn_layer)
    if is_pattern(attn_layer):
        attn_layer = stack(attn_layer)
    layers = _layer_classes(attn_layer)
    if any(layer.needs_tokens() for layer in layers):
        attn_layer = _with_tokens(attn_layer, layers, model_name, arguments)
    try:
        model = timms_create_model(model_name, *positional, attn_layer=attn_layer, **arguments)
    except (TypeError, AssertionError) as error:
        named = "attn_layer" if isinstance(error, TypeError) else "attn"  # a TypeError may be of attn_drop
        if named not in str(error):
            raise
        raise ValueError(_refusal(model_name, given, f"does not take it: {error}")) from error
    if layers and not _mechanisms(model) & {layer.mechanism for layer in layers}:
        raise ValueError(_refusal(model_name, given, "takes it and does not use it"))
    for layer in layers:
        check_given(model, layer.max_tokens, layer.grid_size)
    check_stack(attn_layer, model)
    tell_grid(model)
    if isinstance(given, str):
        model._model_args["attn_layer"] = given  # what timm stores with weights, and what it pickles
    if layers and not _finds_again(model, given):
        store_where_possible(model)
    return model


def _finds_again(model: nn.Module, attn_layer: LayerType) -> bool:
    """Whether timm's own ``create_model`` can build ``model`` again from the ``attn_layer`` that it stores."""
    if not isinstance(attn_layer, str):
        return False
    own = [module for module in model.modules() if isinstance(module, SelfAttention)]
    known = attn_layer in ATTN_LAYERS or isinstance(model, StrictLoading)  # models of ours know patterns
    return isinstance(model, Flowformer) or (
        known and not any(layer.needs_grid or layer.has_positions for layer in own)
    )


def _with_tokens(
    attn_layer: LayerType, layers: Sequence[type[SelfAttention]], model_name: str, arguments: dict[str, Any]
) -> LayerType:
    """``attn_layer`` for as many tokens as the model of that name has, which is built without memory to count them.

    The hierarchical Flowformer has another number in each stage, and tells its layers by itself.
    """
    weights = {"pretrained": False, "checkpoint_path": None}
    with torch.device("meta"):
        model = timms_create_model(model_name, **{**arguments, **weights})
    if isinstance(model, Flowformer):
        return attn_layer
    layer, grid = next(layer for layer in layers if layer.needs_tokens()), fixed_grid(model)
    if grid is None:
        dynamic = arguments.get("dynamic_img_size", False)
        why = f"dynamic_img_size is {dynamic}, and " if dynamic else ""
        raise ValueError(
            f"{why}{model_name} has no fixed number of tokens; allowed with attn_layer={layer.mechanism!r}, which "
            "holds something for each position: a vision transformer for one image size (dynamic_img_size=False)"
        )
    tokens = grid[0] * grid[1] + host_of_tokens(model).num_prefix_tokens
    if is_stack(attn_layer):
        return stack(attn_layer.pattern, tokens, **attn_layer.options)
    return attention_layer(layer.mechanism, max_tokens=tokens, grid_size=layer.grid_size, **layer.options.as_dict())


def asks_for_ours(attn_layer: Any) -> bool:
    """Whether ``attn_layer`` is for our ``create_model``: attention of this plugin, or something that it must refuse.

    Some convolutional networks of timm have names of their own for it, such as "se".
    """
    if isinstance(attn_layer, str):
        return is_pattern(attn_layer) or attn_layer in ATTENTIONS or bool(_layer_classes(attn_layer))
    return attn_layer is not None and (not isinstance(attn_layer, type) or bool(_layer_classes(attn_layer)))


def _layer_classes(attn_layer: LayerType | None) -> list[type[SelfAttention]]:
    """Our layers that ``attn_layer``, a name or a class, stands for; none where it is timm's, or unknown."""
    if is_stack(attn_layer):
        return list(attn_layer.layers)
    layer = ATTN_LAYERS.get(attn_layer) if isinstance(attn_layer, str) else attn_layer
    return [layer] if isinstance(layer, type) and issubclass(layer, SelfAttention) else []


def _mechanisms(model: nn.Module) -> set[str]:
    """Mechanisms of our attention layers in ``model``; the model may have set their options itself."""
    return {module.mechanism for module in model.modules() if isinstance(module, SelfAttention)}


def _refusal(model_name: str, attn_layer: LayerType, why: str) -> str:
    return (
        f"attn_layer is {attn_layer!r}, and {model_name} {why}; allowed: a model that uses it, as most of timm's vit_* "
        "and deit* do, or timm_plugin.replace_attention(model, ...), which says what it cannot replace"
    )
