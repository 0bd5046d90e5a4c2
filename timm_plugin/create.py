"""timm's ``create_model`` for models with another attention, which raises if the model ignores ``attn_layer``."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers.typing import LayerType
from timm.models import create_model as timms_create_model
from timm.models.vision_transformer import ATTN_LAYERS
from torch import nn

from common.attention import ATTENTIONS

from .layers.attention import SelfAttention
from .layers.grid import check_tokens, fixed_tokens, refuse_unknown_tokens, tell_grid
from .layers.layer_spec import LayerSpec, check_attn_layer, check_stack, is_pattern, is_stack, layer_classes, stack
from .models._build import StrictLoading
from .models.flowformer import Flowformer
from .to_folder import store_where_possible


def create_model(model_name: str, *positional: Any, attn_layer: LayerType, **arguments: Any) -> nn.Module:
    """``timm.create_model(model_name, attn_layer=attn_layer, ...)``, which raises if the model ignores ``attn_layer``.

    Some of timm's models accept any argument of that name and silently ignore it. Layers that need the number of
    tokens, or the grid on which they lie (``tell_grid``), get it here; timm's own function does not set it.

    Args:
        model_name: one of ``timm.list_models()``.
        attn_layer: a name in timm's table, which includes ours; a class from ``attention_layer``; or a pattern of
            our names that repeats over the blocks, from the first one, or over the stages of ``flowformer_hier_*``:
            "flow*3,softmax". timm's own ``create_model`` does not support patterns.
        positional, arguments: every other argument of timm's.

    Raises:
        ValueError: ``attn_layer`` is not a name, class or pattern; a pattern of more layers than the model has; a model
            that does not accept or does not use ``attn_layer``; a class whose ``max_tokens`` or ``grid_size`` is not
            the model's; tokens that do not lie on one grid, if the layer needs that.
    """
    if attn_layer is not None:
        check_attn_layer(attn_layer)
    layer = stack(LayerSpec(attn_layer)) if is_pattern(attn_layer) else attn_layer
    classes = layer_classes(layer)
    if any(layer_class.needs_tokens() for layer_class in classes):
        layer = _with_tokens(layer, classes, model_name, arguments)
    try:
        model = timms_create_model(model_name, *positional, attn_layer=layer, **arguments)
    except (TypeError, AssertionError) as error:
        # A TypeError may be about attn_drop; one about SelfAttention is of a network that calls layers in another way.
        words = ("attn_layer", "SelfAttention") if isinstance(error, TypeError) else ("attn",)
        if not any(word in str(error) for word in words):
            raise
        raise ValueError(_refusal(model_name, attn_layer, f"does not take it: {error}")) from error
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    if classes and not {x.mechanism for x in layers} & {x.mechanism for x in classes}:  # a model may set options
        raise ValueError(_refusal(model_name, attn_layer, "takes it and does not use it"))
    for layer_class in classes:
        check_tokens(model, layer_class.max_tokens, layer_class.grid_size)
    check_stack(layer, model)
    tell_grid(model)
    if isinstance(attn_layer, str):
        model._model_args["attn_layer"] = attn_layer  # timm stores and pickles it with the weights
    if classes and not _finds_again(model, layers, attn_layer):
        store_where_possible(model)
    return model


def _finds_again(model: nn.Module, layers: Sequence[SelfAttention], attn_layer: LayerType) -> bool:
    """Whether timm's own ``create_model`` can build ``model`` again from the ``attn_layer`` that it stores."""
    if any(layer.attention.stored_module() is not None for layer in layers):
        return False  # it does not say which module to import
    if not isinstance(attn_layer, str) or isinstance(model, Flowformer):
        return isinstance(attn_layer, str)
    is_known = attn_layer in ATTN_LAYERS or isinstance(model, StrictLoading)  # our models accept patterns
    return is_known and not any(layer.needs_grid or layer.has_positions for layer in layers)


def _with_tokens(
    attn_layer: LayerType, layers: Sequence[type[SelfAttention]], model_name: str, arguments: dict[str, Any]
) -> LayerType:
    """``attn_layer`` for the model's number of tokens, found by building the model on the meta device.

    The hierarchical Flowformer has a different number in each stage, and sets it itself.
    """
    weights = {"pretrained": False, "checkpoint_path": None}
    with torch.device("meta"):
        model = timms_create_model(model_name, **{**arguments, **weights})
    if isinstance(model, Flowformer):
        return attn_layer
    layer, tokens = next(layer for layer in layers if layer.needs_tokens()), fixed_tokens(model)
    if tokens is None:
        refuse_unknown_tokens(model, model_name, layer.mechanism)
    if is_stack(attn_layer):
        return stack(LayerSpec(attn_layer.pattern, attn_layer.options), tokens)
    return layer.with_tokens(tokens, layer.grid_size)


def asks_for_ours(attn_layer: Any) -> bool:
    """Whether our ``create_model`` must handle ``attn_layer``: attention of this plugin, or a value that it refuses.

    Some convolutional networks of timm have other names for this argument, such as "se".
    """
    if isinstance(attn_layer, str):
        return is_pattern(attn_layer) or attn_layer in ATTENTIONS or bool(layer_classes(attn_layer))
    return attn_layer is not None and (not isinstance(attn_layer, type) or bool(layer_classes(attn_layer)))


def _refusal(model_name: str, attn_layer: LayerType, why: str) -> str:
    return (
        f"attn_layer is {attn_layer!r}, and {model_name} {why}; allowed: a model that uses it, as most of timm's vit_* "
        "and deit* do, or timm_plugin.replace_attention(model, ...), which says what it cannot replace"
    )
