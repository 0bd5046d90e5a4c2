"""Register models and attention layers in timm's tables, without warnings if it is repeated."""

import warnings
from collections.abc import Callable

from timm.models import is_model, model_entrypoint, register_model
from timm.models.vision_transformer import ATTN_LAYERS

from common.attention import for_each_attention

from ..layers.attention import attention_layer


def register_attention_layers() -> None:
    """Add our mechanisms to timm's table of names, so that timm's vision transformers know ``attn_layer="flow"``.

    A mechanism that is registered later is added then. A layer that needs facts that timm does not pass raises an error
    that names the call to use. A name that is already timm's or somebody else's is kept, with a warning.
    """
    for_each_attention("bidirectional", _register, images=True)


def _register(name: str) -> None:
    layer = attention_layer(name)
    present = ATTN_LAYERS.setdefault(name, layer)
    if present.__module__ == layer.__module__:
        ATTN_LAYERS[name] = layer
    else:
        warnings.warn(
            f"attn_layer {name!r} is already {present.__module__}.{present.__qualname__} and stays so; "
            f"pass attn_layer=timm_plugin.attention_layer({name!r}) for lineartime's",
            stacklevel=2,
        )


def register_once(entrypoint: Callable) -> Callable:
    """timm's ``register_model`` without a warning if a reload registers the same function of a module again.

    A name that somebody else has registered still gets timm's "Overwriting" warning.
    """
    name = entrypoint.__name__
    registered_here = is_model(name) and model_entrypoint(name).__module__ == entrypoint.__module__
    with warnings.catch_warnings():
        if registered_here:
            warnings.simplefilter("ignore")
        return register_model(entrypoint)
