"""The attention of a built model in timm's folder format, which ``save_for_hf`` and ``push_to_hf_hub`` write.

timm stores the name of an architecture and the arguments it was created with. An attention that was put into one of
timm's models, with options, by a pattern or in some places, is not such an argument. The stored architecture is then
``lineartime``, of ``timm_plugin.from_folder``. Its arguments are the model's own and two more: ``of``, the name of the
original architecture, and ``attention``, the mechanism at each place. timm's ``create_model("local-dir:FOLDER")``
finds that architecture once the plugin is imported.
"""

import math
from typing import Any

from torch import nn

from .layers.attention import SelfAttention
from .layers.grid import fixed_grid
from .models.flowformer import Flowformer

#: The architecture that ``config.json`` names; ``timm_plugin.from_folder`` registers it.
ARCHITECTURE = "lineartime"


def store_attention(model: nn.Module) -> None:
    """Record the attention of ``model`` in it, for timm's ``save_for_hf`` and ``push_to_hf_hub``.

    ``timm_plugin.create_model`` and ``replace_attention`` call it. A model of timm's own ``create_model`` needs it if
    ``attn_layer`` is a class from ``attention_layer``: timm stores only names. A model also needs it if only a part
    of it, such as ``model.blocks``, was given to ``replace_attention``.

    Raises:
        ValueError: ``model`` does not come from ``create_model``, so its architecture is unknown; or its attention is a
            user's own class.
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
    """Set the architecture of ``model``, in a copy of its configuration, to the one of ``timm_plugin.from_folder``."""
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": ARCHITECTURE}


def store_where_possible(model: nn.Module) -> None:
    """Call ``store_attention`` for the models in ``model`` that timm built; with a user's own class, saving fails."""
    for built in [module for module in model.modules() if can_be_stored(module)]:
        layers = _layers(built).values()
        custom = next((type(layer) for layer in layers if not _is_made(layer)), None)
        if custom is not None:  # then timm reports that this argument is not serializable
            built._model_args = {**built._model_args, "attn_layer": custom}
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

    The number of tokens and their grid are stored only if they cannot be found in the model.
    """
    in_model = isinstance(model, Flowformer) or fixed_grid(model) is not None
    entries: list[dict[str, Any]] = []
    for path, layer in layers.items():
        entry = {"name": layer.mechanism, "options": {x: _plain(y) for x, y in layer.options.as_dict().items()}}
        if (module := layer.attention.stored_module()) is not None:
            entry["module"] = module
        sizes = {} if in_model else {"max_tokens": layer.max_tokens, "grid_size": layer.grid_size}
        entry |= {name: value for name, value in sizes.items() if value is not None}
        match = next((other for other in entries if {**other, "places": None} == {**entry, "places": None}), None)
        if match is None:
            entries.append({**entry, "places": [path]})
        else:
            match["places"].append(path)
    return entries


def _plain(value: Any) -> Any:
    """``value``, with infinity, which JSON lacks, as the text that options read."""
    return "inf" if value == math.inf else value
