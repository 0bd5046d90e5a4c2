"""The attention of each module of a built model, from what a user gives ``replace_attention``."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from common.ops.shared.checks import check_choice, shortened

from .layers.attention import SelfAttention, is_layer_class, usable_mechanisms
from .layers.grid import check_tokens, fixed_tokens, refuse_unknown_tokens
from .layers.layer_spec import LayerSpec, is_pattern
from .layers.position_bias import Grid
from .models.flowformer import Flowformer

#: An attention as a user gives it: a mechanism, a mechanism with options, or a class that ``attention_layer`` gives.
AttentionLike = str | tuple[str, Mapping[str, Any]] | type[SelfAttention]

_RANGE = re.compile(r"(\d+)-(\d+)")
_SHOWN = 6


def read_specs(name: AttentionLike | Mapping[str, AttentionLike], options: dict[str, Any]) -> dict[str, LayerSpec]:
    """The ``LayerSpec`` for each place of ``name``; the place "" is the whole model.

    A place is the path of a module; a range of numbers in it means several modules: "blocks.0-8".

    Raises:
        ValueError: an invalid mechanism or module path; options given together with paths.
    """
    if not isinstance(name, Mapping):
        return {"": _read_spec("name", name, options, patterns=True)}
    if not name:
        raise ValueError("name is {}, without a place; allowed: {'blocks.0-8': 'flow'} or other places")
    if options:
        raise ValueError(
            f"{', '.join(options)} is given together with places; allowed: options with the mechanism of a place, as "
            "in {'blocks.0-8': ('flow', {'form': 'paper'})}"
        )
    for place in name:
        if not isinstance(place, str) or not place:
            raise ValueError(f"name has the place {place!r}; allowed: paths of modules, such as 'blocks.0-8'")
    return {place: _read_spec(f"the kind of {place!r}", value, {}, patterns=False) for place, value in name.items()}


def _read_spec(argument: str, value: Any, options: dict[str, Any], patterns: bool) -> LayerSpec:
    """The spec of a name, a class or, with ``patterns``, a pattern, with the options that are given with it."""
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping) and not options:
        value, options = value[0], dict(value[1])
    if is_layer_class(value):
        if options:
            raise ValueError(
                f"{argument} is {value.__name__} with {', '.join(options)}; allowed: a class that has its options "
                "already, attention_layer(NAME, ...)"
            )
    elif not isinstance(value, str) or (is_pattern(value) and not patterns):
        pattern = ", a pattern such as 'flow*3,softmax'" if patterns else ""
        raise ValueError(
            f"{argument} is {shortened(value)}; allowed: the name of a mechanism{pattern}, a pair of a name and its "
            "options, or a class that attention_layer gives"
        )
    elif not is_pattern(value):
        check_choice("attention", value, usable_mechanisms())
    return LayerSpec(value, options)


def modules_of(model: nn.Module, places: Sequence[str], attentions: Sequence[str]) -> dict[str, list[str]]:
    """The ``attentions``, paths in ``model``, that lie in each of ``places``, in their order.

    Raises:
        ValueError: ``model`` has no such place, it has no attention, or an attention that is in another place too.
    """
    inside: dict[str, list[str]] = {}
    for place in places:
        paths = _attention_in(model, place, attentions) if place else list(attentions)
        for other in inside:
            if shared := [path for path in paths if path in inside[other]]:
                raise ValueError(
                    f"{shared[0]} is in {other!r} and in {place!r}; allowed: places of which none is in another"
                )
        inside[place] = paths
    return inside


def _attention_in(model: nn.Module, place: str, attentions: Sequence[str]) -> list[str]:
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    inside: list[str] = []
    for path in _paths(place, place):
        matches = [attention for attention in attentions if _is_in(attention, path)]
        if not matches:
            what = "no attention" if path in modules else "not there"
            listed = ", ".join([*attentions[:_SHOWN], *(["..."] if len(attentions) > _SHOWN else [])])
            with_attention = [x for x in modules if any(_is_in(attention, x) for attention in attentions)]
            near = difflib.get_close_matches(path, with_attention, n=1)
            raise ValueError(
                f"the place {place!r} is not one of {type(model).__name__}: {path} is {what}; allowed: a module with "
                f"attention in it. There is attention in {listed or 'none'}{''.join(f'; nearest: {x!r}' for x in near)}"
            )
        inside += matches
    return inside


def _is_in(attention: str, path: str) -> bool:
    """Whether ``attention`` is the module at ``path``, or in it."""
    return attention == path or attention.startswith(f"{path}.")


def _paths(ending: str, place: str) -> Iterator[str]:
    """The paths that ``ending``, the end of ``place``, stands for: three for "blocks.0-2".

    Raises:
        ValueError: an empty range.
    """
    first, dot, ending = ending.partition(".")
    limits = _RANGE.fullmatch(first)
    numbers = range(int(limits[1]), int(limits[2]) + 1) if limits else [first]
    if not numbers:
        raise ValueError(f"the place {place!r} has the range {first}; allowed: from a number to one not below it")
    for number in numbers:
        for tail in _paths(ending, place) if dot else [""]:
            yield f"{number}{dot}{tail}"


def layers_by_path(
    model: nn.Module, spec: LayerSpec, paths: Sequence[str], max_tokens: int | None, grid_size: Grid | None
) -> dict[str, type[SelfAttention]]:
    """The class of the attention at each of ``paths``: that of its stage in a ``Flowformer``, else in their order.

    Raises:
        ValueError: a mechanism, its options or a pattern that does not fit ``model``.
    """
    by_stage = {
        f"{path}.stages.{i}.".removeprefix("."): layer
        for path, host in flowformers_in(model, max_tokens, grid_size).items()
        for i, layer in enumerate(host.stage_layers(spec))
    }
    layers = {path: layer for path in paths for stage, layer in by_stage.items() if path.startswith(stage)}
    remaining = [path for path in paths if path not in layers]
    specs = spec.for_layers(len(remaining), "name") if remaining else []
    return layers | {
        path: _layer_for(model, layer_spec, max_tokens, grid_size) for path, layer_spec in zip(remaining, specs)
    }


def flowformers_in(model: nn.Module, max_tokens: int | None, grid_size: Grid | None) -> dict[str, Flowformer]:
    """The models in ``model`` that know the grid of each stage, by path; empty if a user gives a number or grid."""
    if max_tokens is not None or grid_size is not None:
        return {}
    return {path: module for path, module in model.named_modules() if isinstance(module, Flowformer)}


def _layer_for(
    model: nn.Module, spec: LayerSpec, max_tokens: int | None, grid_size: Grid | None
) -> type[SelfAttention]:
    """The attention for the tokens of ``model``; ValueError if it needs their number, and that is unknown."""
    tokens = fixed_tokens(model) or max_tokens
    layer = spec.layer_class(tokens, grid_size)
    if layer is spec.attention:
        layer = layer.with_tokens(tokens, layer.grid_size or grid_size)
        check_tokens(model, layer.max_tokens, layer.grid_size)
    if layer.needs_tokens():
        refuse_unknown_tokens(model, type(model).__name__, layer.mechanism)
    return layer
