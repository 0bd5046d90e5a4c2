"""The attention of a built model in timm's format of folders: what ``save_for_hf`` and ``push_to_hf_hub`` write.

timm stores the name of an architecture and the arguments it was created with. An attention that was put into a model of
timm's, with options, by a pattern or in some places, is no such argument. So the architecture is that of
``timm_plugin.restored``, ``lineartime``, and its arguments are the model's own with two more: ``of``, the name of the
architecture underneath, and ``attention``, the mechanism at each place. timm's ``create_model("local-dir:FOLDER")``
finds that architecture once the plugin is imported.
"""

import math
from typing import Any

from torch import nn

from .layers.attention import SelfAttention
from .layers.grid import fixed_grid
from .models.flowformer import Flowformer

#: The architecture that ``config.json`` names; ``timm_plugin.restored`` registers it.
ARCHITECTURE = "lineartime"


def store_attention(model: nn.Module) -> None:
    """Note in ``model`` which attention it has, for timm's ``save_for_hf`` and ``push_to_hf_hub``.

    ``timm_plugin.create_model`` and ``replace_attention`` call it. A model of timm's own ``create_model`` needs it if
    ``attn_layer`` is a class that ``attention_layer`` gives: timm stores only names. A model also needs it if only a
    part of it, such as ``model.blocks``, was given to ``replace_attention``.

    Raises:
        ValueError: ``model`` is not one of timm's ``create_model``, which alone knows its architecture; or its
            attention is a class of a user's own.
    """
    if not can_be_stored(model):
        raise ValueError(
            f"model is a {type(model).__name__} that does not know its architecture; allowed: what timm.create_model "
            "or timm_plugin.create_model gives"
        )
    layers = _layers(model)
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without attention of lineartime; allowed: one that has it")
    if own := [path for path, layer in layers.items() if not _is_made(layer)]:
        raise ValueError(
            f"{own[0]} is a {type(layers[own[0]]).__name__}, a class of your own; allowed in a folder: layers of the "
            "classes that attention_layer gives"
        )
    arguments = dict(model._model_args)
    name = arguments.pop("of", model.pretrained_cfg["architecture"])
    if not (isinstance(model, Flowformer) and isinstance(arguments.get("attn_layer"), str)):
        arguments.pop("attn_layer", None)
    model._model_args = {**arguments, "of": name, "attention": _described(model, layers)}
    name_architecture(model)


def name_architecture(model: nn.Module) -> None:
    """Set the architecture of ``model``, in a configuration of its own, to the one of ``timm_plugin.restored``."""
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": ARCHITECTURE}


def store_where_possible(model: nn.Module) -> None:
    """Call ``store_attention`` for the models in ``model`` that timm has built; saving a user's own class fails."""
    for built in [module for module in model.modules() if can_be_stored(module)]:
        layers = _layers(built).values()
        own = next((type(layer) for layer in layers if not _is_made(layer)), None)
        if own is not None:  # timm says that this argument is not serializable
            built._model_args = {**built._model_args, "attn_layer": own}
        elif layers:
            store_attention(built)


def can_be_stored(model: nn.Module) -> bool:
    """Whether timm's ``create_model`` has built ``model``, and not as a wrapper that gives features."""
    arguments, cfg = getattr(model, "_model_args", None), getattr(model, "pretrained_cfg", None) or {}
    return arguments is not None and "architecture" in cfg and not arguments.get("features_only")


def _layers(model: nn.Module) -> dict[str, SelfAttention]:
    return {path: module for path, module in model.named_modules() if isinstance(module, SelfAttention)}


def _is_made(layer: SelfAttention) -> bool:
    """Whether the class of ``layer`` is one that ``attention_layer`` made, not one derived from it."""
    return "options" in vars(type(layer))


def _described(model: nn.Module, layers: dict[str, SelfAttention]) -> list[dict[str, Any]]:
    """Each attention in ``model``, with its options and the paths where it is, as JSON has it.

    The number of tokens and their grid are found again in the model; only where they cannot be are they stored.
    """
    found_again = isinstance(model, Flowformer) or fixed_grid(model) is not None
    entries: list[dict[str, Any]] = []
    for path, layer in layers.items():
        entry = {"name": layer.mechanism, "options": {x: _plain(y) for x, y in layer.options.as_dict().items()}}
        sizes = {} if found_again else {"max_tokens": layer.max_tokens, "grid_size": layer.grid_size}
        entry |= {name: value for name, value in sizes.items() if value is not None}
        same = next((other for other in entries if {**other, "places": None} == {**entry, "places": None}), None)
        if same is None:
            entries.append({**entry, "places": [path]})
        else:
            same["places"].append(path)
    return entries


def _plain(value: Any) -> Any:
    """``value``, with infinity, which JSON lacks, as the text that options read."""
    return "inf" if value == math.inf else value
