"""Stacks of layers with several kinds of attention: a pattern such as "flow*3,softmax", which repeats."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from timm.layers.typing import LayerType
from timm.models.vision_transformer import ATTN_LAYERS
from torch import nn

from common.attention import ATTENTIONS, layer_kinds, pattern_names
from common.ops.shared.checks import ArgumentError, allowed_names, shortened

from .attention import SelfAttention, attention_layer, usable_mechanisms


class Stack(nn.Module):
    """A class for ``attn_layer=`` of one model: its calls give that model's layers, in the order of a pattern.

    ``stack`` makes the subclasses, a new one for each model, which no model holds. timm's vision transformers call what
    they are given as ``attn_layer`` once for each block, from the first on.
    """

    pattern: ClassVar[str]
    options: ClassVar[Mapping[str, Any]]
    layers: ClassVar[Sequence[type[SelfAttention]]]
    made: ClassVar[int] = 0

    def __new__(cls, *arguments: Any, **further: Any) -> SelfAttention:
        """The next layer, of ``cls.layers`` in turns."""
        layer = cls.layers[cls.made % len(cls.layers)]
        cls.made += 1
        return layer(*arguments, **further)


def stack(pattern: str, max_tokens: int | None = None, **options: Any) -> type[Stack]:
    """A ``Stack`` of the layers of ``pattern``; each option goes to those mechanisms of it that have it.

    Raises:
        ValueError: a pattern of another form, an unknown mechanism, an option that none of them has, or a value that is
            not allowed.
    """
    names = names_in(pattern)
    layers = [attention_layer(name, max_tokens=max_tokens, **own) for name, own in with_own(names, options)]
    return type("StackOfSelfAttention", (Stack,), {"pattern": pattern, "options": options, "layers": layers})


def is_pattern(attn_layer: Any) -> bool:
    """Whether ``attn_layer`` is text that names several layers, right or wrong."""
    return isinstance(attn_layer, str) and ("," in attn_layer or "*" in attn_layer)


def is_stack(attn_layer: Any) -> bool:
    """Whether ``attn_layer`` is a class that ``stack`` made."""
    return isinstance(attn_layer, type) and issubclass(attn_layer, Stack)


def check_attn_layer(attn_layer: Any) -> None:
    """Raise ValueError unless ``attn_layer`` is a name in timm's table, a pattern, or a class of layers."""
    if isinstance(attn_layer, str):
        if not is_pattern(attn_layer) and attn_layer not in ATTN_LAYERS:
            names = allowed_names(attn_layer, filter(None, ATTN_LAYERS))
            raise ValueError(
                f"attn_layer is {shortened(attn_layer)}; {names}, or a class such as attention_layer gives"
            )
    elif not (isinstance(attn_layer, type) and issubclass(attn_layer, nn.Module)):
        raise ValueError(
            f"attn_layer is {shortened(attn_layer)}; allowed: the name of a mechanism, a pattern such as "
            "'flow*3,softmax', or a class such as attention_layer gives"
        )


def names_in(pattern: str, argument: str = "attn_layer") -> list[str]:
    """The mechanisms of one period of ``pattern``, a name for each layer; ValueError where it is none."""
    try:
        return pattern_names(pattern, usable_mechanisms())
    except ArgumentError as error:
        raise ValueError(error.with_names({"layers": argument})) from error


def kinds_of(pattern: str, layers: int, argument: str = "attn_layer") -> list[str]:
    """The mechanism of each of so many ``layers``; ValueError for a pattern of more layers than there are."""
    try:
        return layer_kinds(pattern, usable_mechanisms(), range(layers))
    except ArgumentError as error:
        raise ValueError(error.with_names({"layers": argument})) from error


def with_own(names: Sequence[str], options: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each of ``names`` with those of ``options`` that are its own; ValueError for one that is nobody's."""
    for option in options:
        if not any(option in ATTENTIONS[name].Options.described() for name in names):
            allowed = sorted({own for name in names for own in ATTENTIONS[name].Options.described()})
            given = ", ".join(map(repr, dict.fromkeys(names)))
            raise ValueError(f"attention {given} has no option {shortened(option)}; {allowed_names(option, allowed)}")
    return [
        (name, {option: value for option, value in options.items() if option in ATTENTIONS[name].Options.described()})
        for name in names
    ]


def mechanisms_in(attn_layer: LayerType | None) -> list[str]:
    """The known names in ``attn_layer``: itself, those of a pattern or of a stack; none where it is another class."""
    if is_stack(attn_layer):
        attn_layer = attn_layer.pattern
    items = attn_layer.split(",") if isinstance(attn_layer, str) else []
    return [name for name in (item.partition("*")[0].strip() for item in items) if name in ATTENTIONS]


def option_names(attn_layer: LayerType, also: str = "flow") -> set[str]:
    """Names of the options of the mechanisms in ``attn_layer``, and of ``also``."""
    return {option for name in [*mechanisms_in(attn_layer), also] for option in ATTENTIONS[name].Options.described()}


def with_options(attn_layer: LayerType, **options: Any) -> LayerType:
    """``attn_layer`` as a user gives it, with those ``options`` of the mechanisms in it that are not None.

    Raises:
        ValueError: options that the mechanisms do not have or allow, or for an attention that is not one of ours; a
            pattern that is none.
    """
    check_attn_layer(attn_layer)
    known = option_names(attn_layer)
    options = {name: value for name, value in options.items() if value is not None or name not in known}
    if is_pattern(attn_layer):
        return stack(attn_layer, **options)
    if is_stack(attn_layer):
        return stack(attn_layer.pattern, attn_layer.layers[0].max_tokens, **{**attn_layer.options, **options})
    if attn_layer in usable_mechanisms():
        return attention_layer(attn_layer, **options)
    if options:
        raise ValueError(
            f"attn_layer is {attn_layer!r}, which takes no {', '.join(options)}; "
            f"allowed with these: {', '.join(usable_mechanisms())}"
        )
    return attn_layer


def check_stack(attn_layer: LayerType, model: nn.Module) -> None:
    """Raise ValueError unless ``model``, just built with the stack ``attn_layer``, has its layers in their order.

    Another class than a stack is not looked at, nor is a stack of which the model has made one for itself.
    """
    if not is_stack(attn_layer) or not attn_layer.made:
        return
    kinds = kinds_of(attn_layer.pattern, attn_layer.made)
    own = [module.mechanism for module in model.modules() if isinstance(module, SelfAttention)]
    if own != kinds[: len(own)]:  # fewer where timm has left out blocks that features do not need
        raise ValueError(
            f"attn_layer is {attn_layer.pattern!r}, and {type(model).__name__} does not build its attentions in their "
            "order; allowed: one name, or timm_plugin.replace_attention(model, ...)"
        )
