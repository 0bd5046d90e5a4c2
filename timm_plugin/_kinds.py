"""Which attention each place of a built model gets: of one kind, of a pattern, or as places say."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from common.ops.shared.checks import check_choice, shortened

from .layers.attention import SelfAttention, attention_layer, usable_mechanisms
from .layers.grid import check_given, fixed_grid, host_of_tokens
from .layers.position_bias import Grid
from .layers.stacks import is_pattern, kinds_of, with_own
from .models.flowformer import Flowformer

#: What stands in a place: a mechanism, the same with options, or a class that ``attention_layer`` gives.
Kind = str | tuple[str, Mapping[str, Any]] | type[SelfAttention]
#: Layers by the path of the attention whose place they take.
Layers = dict[str, type[SelfAttention]]

_RANGE = re.compile(r"(\d+)-(\d+)")
_SHOWN = 6


def read_kinds(
    name: Kind | Mapping[str, Kind], options: dict[str, Any]
) -> dict[str, tuple[str | type[SelfAttention], dict[str, Any]]]:
    """The kind of each place and its options; "" is the whole model.

    Raises:
        ValueError: an invalid mechanism or module path; options given together with paths.
    """
    if not isinstance(name, Mapping):
        return {"": _read_kind("name", name, options, patterns=True)}
    if not name:
        raise ValueError("name is {}, without a place; allowed: {'blocks.0-8': 'flow'} or other places")
    if options:
        raise ValueError(
            f"{', '.join(options)} is given beside places; allowed: options with the mechanism of a place, as in "
            "{'blocks.0-8': ('flow', {'form': 'paper'})}"
        )
    for place in name:
        if not isinstance(place, str) or not place:
            raise ValueError(f"name has the place {place!r}; allowed: paths of modules, such as 'blocks.0-8'")
    return {place: _read_kind(f"the kind of {place!r}", kind, {}, patterns=False) for place, kind in name.items()}


def attention_in(model: nn.Module, place: str, attentions: Sequence[str]) -> list[str]:
    """The ``attentions``, paths in ``model``, that lie in ``place``, in their order.

    Raises:
        ValueError: ``model`` has no such module, or there is no attention in it.
    """
    if not place:
        return list(attentions)
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    found: list[str] = []
    for path in _paths(place, place):
        inside = [one for one in attentions if _holds(path, [one])]
        if not inside:
            what = "no attention" if path in modules else "not there"
            shown = ", ".join([*attentions[:_SHOWN], *(["..."] if len(attentions) > _SHOWN else [])])
            near = difflib.get_close_matches(path, [x for x in modules if _holds(x, attentions)], n=1)
            raise ValueError(
                f"the place {place!r} is not one of {type(model).__name__}: {path} is {what}; allowed: a module with "
                f"attention in it. There is attention in {shown or 'none'}{''.join(f'; nearest: {x!r}' for x in near)}"
            )
        found += inside
    return found


def _holds(path: str, attentions: Sequence[str]) -> bool:
    """Whether one of ``attentions`` is the module at ``path``, or in it."""
    return any(one == path or one.startswith(f"{path}.") for one in attentions)


def layers_for(
    model: nn.Module,
    kind: str | type[SelfAttention],
    paths: Sequence[str],
    max_tokens: int | None,
    grid_size: Grid | None,
    options: dict[str, Any],
) -> Layers:
    """The layer for the attention at each of ``paths``: that of its stage in a ``Flowformer``, or of the others.

    Raises:
        ValueError: a mechanism, its options or a pattern that does not fit ``model``.
    """
    by_stage = {
        f"{path}.stages.{i}.".removeprefix("."): layer
        for path, host in staged(model, max_tokens, grid_size).items()
        for i, layer in enumerate(host.stage_layers(kind, **options))
    }
    layers = {path: layer for path in paths for stage, layer in by_stage.items() if path.startswith(stage)}
    others = [path for path in paths if path not in layers]
    if not others:
        return layers
    if is_pattern(kind):
        kinds = with_own(kinds_of(kind, len(others), "name"), options)
    else:
        kinds = [(kind, options)] * len(others)
    further = {path: _layer_for(model, *one, max_tokens, grid_size) for path, one in zip(others, kinds)}
    return layers | further


def staged(model: nn.Module, max_tokens: int | None, grid_size: Grid | None) -> dict[str, Flowformer]:
    """The models in ``model`` that tell each of their stages its grid, by path; none where a user says one."""
    if max_tokens is not None or grid_size is not None:
        return {}
    return {path: module for path, module in model.named_modules() if isinstance(module, Flowformer)}


def _read_kind(
    argument: str, kind: Any, options: dict[str, Any], patterns: bool
) -> tuple[str | type[SelfAttention], dict[str, Any]]:
    """A name, with ``patterns`` also a pattern, or a class, and the options that are given with it."""
    if isinstance(kind, (tuple, list)) and len(kind) == 2 and isinstance(kind[1], Mapping) and not options:
        kind, options = kind[0], dict(kind[1])
    if isinstance(kind, type) and issubclass(kind, SelfAttention):
        if options:
            raise ValueError(
                f"{argument} is {kind.__name__} with {', '.join(options)}; allowed: a class that has its options "
                "already, attention_layer(NAME, ...)"
            )
        return kind, {}
    if is_pattern(kind) and patterns:
        return kind, options
    if not isinstance(kind, str) or is_pattern(kind):
        pattern = ", a pattern such as 'flow*3,softmax'" if patterns else ""
        raise ValueError(
            f"{argument} is {shortened(kind)}; allowed: the name of a mechanism{pattern}, a pair of a name and its "
            "options, or a class that attention_layer gives"
        )
    check_choice("attention", kind, usable_mechanisms())
    return kind, options


def _paths(rest: str, place: str) -> Iterator[str]:
    """The paths that ``rest``, the end of ``place``, stands for, as "blocks.0-2" for three.

    Raises:
        ValueError: a range in which there is no number.
    """
    first, dot, rest = rest.partition(".")
    found = _RANGE.fullmatch(first)
    numbers = range(int(found[1]), int(found[2]) + 1) if found else [first]
    if not numbers:
        raise ValueError(f"the place {place!r} has the range {first}; allowed: from a number to one not below it")
    for number in numbers:
        for tail in _paths(rest, place) if dot else [""]:
            yield f"{number}{dot}{tail}"


def _layer_for(
    model: nn.Module,
    kind: str | type[SelfAttention],
    options: dict[str, Any],
    max_tokens: int | None,
    grid_size: Grid | None,
) -> type[SelfAttention]:
    """Attention for the tokens of ``model``; ValueError where it must know how many, and nothing says it."""
    tokens = {"max_tokens": max_tokens, **_tokens_of(model)}
    if isinstance(kind, str):
        layer = attention_layer(kind, grid_size=grid_size, **tokens, **options)
    elif kind.needs_tokens():
        own = kind.options.as_dict()
        layer = attention_layer(kind.mechanism, grid_size=kind.grid_size or grid_size, **tokens, **own)
    else:
        layer = kind
        check_given(model, layer.max_tokens, layer.grid_size)
    if layer.needs_tokens():
        host = host_of_tokens(model)
        or_max_tokens = ", or max_tokens" if host is None else ""  # tell_grid wants one size of images
        why = "dynamic_img_size is True" if getattr(host, "dynamic_img_size", False) else "max_tokens is not given"
        raise ValueError(
            f"{why}, and {type(model).__name__} has no fixed number of tokens; allowed with "
            f"{layer.mechanism!r}: a vision transformer for one image size (dynamic_img_size=False){or_max_tokens}"
        )
    return layer


def _tokens_of(model: nn.Module) -> dict[str, Any]:
    """The number of tokens of ``model``, where it is fixed."""
    grid = fixed_grid(model)
    return {} if grid is None else {"max_tokens": grid[0] * grid[1] + host_of_tokens(model).num_prefix_tokens}
