"""``lineartime``, the architecture of stored models in which the attention was replaced.

``timm.create_model("local-dir:FOLDER", pretrained=True)`` builds it from what ``timm_plugin.to_folder`` wrote.
"""

from collections.abc import Mapping
from typing import Any

from timm.models import generate_default_cfgs, is_model, load_pretrained, model_entrypoint
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from common.attention import ATTENTIONS, how_to_import
from common.ops.shared.checks import allowed_names, shortened

from .layers.attention import SelfAttention, attention_layer
from .models._build import check_depth
from .models._default_cfg import untrained_cfg
from .models._registry import register_once
from .models._weights import fit_hierarchical, fit_vision_transformer
from .models.flowformer import Flowformer
from .replace import attention_modules, swap_attention
from .to_folder import ARCHITECTURE, name_architecture

__all__: list[str] = []  # register_model appends the entry point

default_cfgs = generate_default_cfgs({f"{ARCHITECTURE}.untrained": untrained_cfg()})

_NAMES = {"name", "options", "places", "max_tokens", "grid_size", "module"}
_FORM = "[{'name': 'flow', 'options': {}, 'places': ['blocks.0.attn']}], as timm's save_for_hf stores it"


@register_once
def lineartime(
    pretrained: bool = False, of: str | None = None, attention: list[dict[str, Any]] | None = None, **kwargs: Any
) -> nn.Module:
    """One of timm's models or ours, with another attention, as a folder stores it.

    Args:
        of: the name of the model's original architecture.
        attention: for each attention its ``name``, its ``options`` and its ``places``, paths of modules; with
            ``max_tokens`` and ``grid_size`` if they cannot be found in the model.
        kwargs: every other argument of that architecture.

    Raises:
        ValueError: invalid values of these; an attention, or an option of one, in addition to the stored ones.
    """
    if not isinstance(of, str) or not is_model(of) or of.partition(".")[0] == ARCHITECTURE:
        raise ValueError(
            f"of is {shortened(of)}; allowed for {ARCHITECTURE}: the name of a model, as a folder stores it"
        )
    _refuse_further(kwargs)
    check_depth(kwargs)
    layers = _read_layers(attention)
    model = model_entrypoint(of)(pretrained=False, **kwargs)
    _check_places(model, layers, of)
    swap_attention(model, layers)
    name_architecture(model)
    if pretrained:
        fit = _filter(model)
        load_pretrained(
            model,
            model.pretrained_cfg,
            num_classes=model.num_classes,
            in_chans=kwargs.get("in_chans", 3),
            filter_fn=fit,
            strict=fit is None,  # fit compares all names and shapes
            cache_dir=kwargs.get("cache_dir"),
        )
    return model


def _refuse_further(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an attention, or an option of it, that is not stored, and for ``features_only``."""
    if kwargs.get("features_only"):
        raise ValueError(
            "features_only is True; allowed for a stored model whose attention was swapped: "
            "timm.models.FeatureGetterNet(timm.create_model(...)), or forward_intermediates of the model"
        )
    stored = kwargs.get("pretrained_model_args") or {}
    options = {option for mechanism in ATTENTIONS.values() for option in mechanism.Options.described()}
    for name in sorted({"attn_layer", *options} & kwargs.keys()):
        if name not in stored or kwargs[name] != stored[name]:
            raise ValueError(
                f"{name} is {shortened(kwargs[name])}, and the stored model has its own attention; allowed: nothing, "
                "and timm_plugin.replace_attention(model, ...) afterwards"
            )


def _read_layers(attention: Any) -> dict[str, type[SelfAttention]]:
    """The class of the layer at each path; ValueError for a malformed list, or one with a place twice."""
    layers: dict[str, type[SelfAttention]] = {}
    for entry in attention if isinstance(attention, list) and attention else [None]:
        if not _is_entry(entry):
            raise ValueError(f"attention is {shortened(attention)}; allowed for {ARCHITECTURE}: {_FORM}")
        tokens = {name: entry.get(name) for name in ("max_tokens", "grid_size")}
        known = not isinstance(entry["name"], str) or entry["name"] in ATTENTIONS
        if not known and isinstance(module := entry.get("module"), str):
            raise ValueError(f"attention is {shortened(entry['name'])}, which the model has; {how_to_import(module)}")
        layer = attention_layer(entry["name"], **tokens, **entry.get("options", {}))
        for place in map(str, entry["places"]):
            if place in layers:
                raise ValueError(f"attention has the place {shortened(place)} twice; allowed: each place once")
            layers[place] = layer
    return layers


def _is_entry(entry: Any) -> bool:
    """Whether ``entry`` has the names that describe an attention, options and places among them."""
    if not isinstance(entry, Mapping) or not {"name", "places"} <= entry.keys() <= _NAMES:
        return False
    own, places = entry.get("options", {}), entry["places"]
    return isinstance(own, Mapping) and not own.keys() & _NAMES and isinstance(places, list) and bool(places)


def _check_places(model: nn.Module, layers: dict[str, type[SelfAttention]], of: str) -> None:
    attentions = attention_modules(model)
    for place in layers:
        if place not in attentions:
            raise ValueError(
                f"attention has the place {shortened(place)}, where {of} has none; {allowed_names(place, attentions)}"
            )


def _filter(model: nn.Module) -> Any:
    """The function that fits stored weights to another image size; None if the model has none."""
    if isinstance(model, Flowformer):
        return fit_hierarchical
    return fit_vision_transformer if isinstance(model, VisionTransformer) else None
