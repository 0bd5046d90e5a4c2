"""Registering models and attention layers in timm's tables, quietly when it is done again."""

import warnings
from typing import Callable, Dict, Type

from timm.models import is_model, model_entrypoint, register_model
from timm.models.vision_transformer import ATTN_LAYERS

from .attention import FlowSelfAttention, LinearSelfAttention, SelfAttention, SoftmaxSelfAttention
from .daft_attention import DaftConvSelfAttention

#: What ``attn_layer=NAME`` builds: timm's table of names gets these entries.
ATTENTION_LAYERS: Dict[str, Type[SelfAttention]] = {
    layer.mechanism: layer
    for layer in (DaftConvSelfAttention, FlowSelfAttention, LinearSelfAttention, SoftmaxSelfAttention)
}


def register_attention_layers() -> None:
    """Put ``ATTENTION_LAYERS`` into timm's own table, so that any stock vision transformer takes ``attn_layer="flow"``.

    A name that is timm's or somebody else's is left alone, with a warning.
    """
    for name, layer in ATTENTION_LAYERS.items():
        present = ATTN_LAYERS.setdefault(name, layer)
        if present.__module__ == layer.__module__:
            ATTN_LAYERS[name] = layer
        else:
            warnings.warn(
                f"attn_layer {name!r} is already {present.__module__}.{present.__qualname__} and stays so; "
                f"pass attn_layer={layer.__module__}.{layer.__qualname__} for lineartime's",
                stacklevel=2,
            )


def register_once(entrypoint: Callable) -> Callable:
    """timm's ``register_model`` that does not warn when a reload registers the same function of the same module again.

    A name that somebody else has registered still gets timm's "Overwriting" warning.
    """
    name = entrypoint.__name__
    ours = is_model(name) and model_entrypoint(name).__module__ == entrypoint.__module__
    with warnings.catch_warnings():
        if ours:
            warnings.simplefilter("ignore")
        return register_model(entrypoint)
