"""The attention of a model's layers: a ``LayerSpec`` for each layer, or a pattern for several.

A pattern, such as "flow*3,softmax", is a list of names with counts of layers; it repeats from the first layer on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from timm.layers.typing import LayerType
from timm.models.vision_transformer import ATTN_LAYERS
from torch import nn

from common.attention import ATTENTIONS, layer_kinds, pattern_names
from common.ops.shared.checks import ArgumentError, allowed_names, shortened

from .attention import SelfAttention, attention_layer, is_layer_class, usable_mechanisms
from .position_bias import Grid

#: Default options that differ between stages, from the number of stages that follow. SOFT's authors use ratios 8, 4, 2
#: and 1, which give 49 landmarks for 56 x 56, 28 x 28, 14 x 14 and 7 x 7 tokens.
BY_STAGE: dict[str, Callable[[int], dict[str, Any]]] = {"soft": lambda following: {"ratio": 2**following}}


class LayerSpec(NamedTuple):
    """A user's attention: a name or a class, ours or timm's, or a pattern of our names, with its options.

    In a pattern, an option applies to every mechanism that has it.
    """

    attention: LayerType
    options: Mapping[str, Any] = {}

    def for_layers(self, layers: int | None = None, argument: str = "attn_layer") -> list["LayerSpec"]:
        """The specs of this number of ``layers``; if None, those of one period of a pattern.

        Raises:
            ValueError: a malformed pattern or one of more layers than there are, an unknown mechanism, or an option
                that no mechanism of the pattern has. ``argument`` is the name of the pattern in the message.
        """
        if is_stack(self.attention):
            return self._of_stack().for_layers(layers, argument)
        if not is_pattern(self.attention):
            return [self] * (1 if layers is None else layers)
        try:
            if layers is None:
                names = pattern_names(self.attention, usable_mechanisms())
            else:
                names = layer_kinds(self.attention, usable_mechanisms(), range(layers))
        except ArgumentError as error:
            raise ValueError(error.with_names({"layers": argument})) from error
        return share_options(names, self.options)

    def without_defaults(self) -> "LayerSpec":
        """This spec without options that are None, which means the default in a model's arguments."""
        names = option_names(self.attention)
        return self._replace(options={x: y for x, y in self.options.items() if y is not None or x not in names})

    def layer_class(self, max_tokens: int | None = None, grid_size: Grid | None = None) -> LayerType:
        """The class for ``attn_layer`` of timm's vision transformers; timm's own name or class is returned unchanged.

        For a pattern it is a ``Stack``. ``max_tokens`` and ``grid_size`` are those of ``attention_layer``.

        Raises:
            ValueError: options that the mechanism does not have or allow, or options of an attention that is not ours;
                an invalid pattern.
        """
        if is_stack(self.attention):
            return stack(self._of_stack(), self.attention.layers[0].max_tokens)
        if is_pattern(self.attention):
            return stack(self, max_tokens)
        if self.attention in usable_mechanisms():
            return attention_layer(self.attention, max_tokens=max_tokens, grid_size=grid_size, **self.options)
        if self.options:
            raise ValueError(
                f"attn_layer is {self.attention!r}, which takes no {', '.join(self.options)}; "
                f"allowed with these: {', '.join(usable_mechanisms())}"
            )
        return self.attention

    def _of_stack(self) -> "LayerSpec":
        """The pattern of a stack, with its options and those of this spec."""
        return LayerSpec(self.attention.pattern, {**self.attention.options, **self.options})


class Stack(nn.Module):
    """A class for ``attn_layer=`` of one model: its calls give that model's layers, in the order of a pattern.

    ``stack`` makes a new subclass for each model; models do not keep it. timm's vision transformers call ``attn_layer``
    once for each block, from the first on.
    """

    pattern: ClassVar[str]
    options: ClassVar[Mapping[str, Any]]
    layers: ClassVar[Sequence[type[SelfAttention]]]
    made: ClassVar[int] = 0

    def __new__(cls, *arguments: Any, **keywords: Any) -> SelfAttention:
        """The next layer; ``cls.layers`` take turns."""
        layer = cls.layers[cls.made % len(cls.layers)]
        cls.made += 1
        return layer(*arguments, **keywords)


def stack(spec: LayerSpec, max_tokens: int | None = None) -> type[Stack]:
    """A ``Stack`` of the layers of a pattern; ValueError as ``LayerSpec.for_layers`` and ``attention_layer``."""
    layers = [layer.layer_class(max_tokens) for layer in spec.for_layers()]
    members = {"pattern": spec.attention, "options": spec.options, "layers": layers}
    return type("StackOfSelfAttention", (Stack,), members)


def is_pattern(attn_layer: Any) -> bool:
    """Whether ``attn_layer`` is text that names several layers; it may be invalid."""
    return isinstance(attn_layer, str) and ("," in attn_layer or "*" in attn_layer)


def is_stack(attn_layer: Any) -> bool:
    """Whether ``attn_layer`` is a class that ``stack`` made."""
    return isinstance(attn_layer, type) and issubclass(attn_layer, Stack)


def layer_classes(attn_layer: LayerType | None) -> list[type[SelfAttention]]:
    """Our layers that ``attn_layer``, a name or a class, means; empty if it is timm's, or unknown."""
    if is_stack(attn_layer):
        return list(attn_layer.layers)
    layer = ATTN_LAYERS.get(attn_layer) if isinstance(attn_layer, str) else attn_layer
    return [layer] if is_layer_class(layer) else []


def check_attn_layer(attn_layer: Any) -> None:
    """Raise ValueError unless ``attn_layer`` is a name in timm's table, a pattern, or a class of layers."""
    if isinstance(attn_layer, str):
        if not is_pattern(attn_layer) and attn_layer not in ATTN_LAYERS:
            names = allowed_names(attn_layer, filter(None, ATTN_LAYERS))
            raise ValueError(
                f"attn_layer is {shortened(attn_layer)}; {names}, a class such as attention_layer gives, or your own "
                "attention in a file that LINEARTIME_MECHANISMS names"
            )
    elif not (isinstance(attn_layer, type) and issubclass(attn_layer, nn.Module)):
        raise ValueError(
            f"attn_layer is {shortened(attn_layer)}; allowed: the name of a mechanism, a pattern such as "
            "'flow*3,softmax', or a class such as attention_layer gives"
        )


def share_options(names: Sequence[str], options: Mapping[str, Any]) -> list[LayerSpec]:
    """Each of ``names`` with the ``options`` that it has; ValueError for an option that no mechanism has."""
    options_of = {name: ATTENTIONS[name].Options.described().keys() for name in names}
    for option in options:
        if not any(option in allowed for allowed in options_of.values()):
            mechanisms, allowed = ", ".join(map(repr, options_of)), sorted(set().union(*options_of.values()))
            raise ValueError(
                f"attention {mechanisms} has no option {shortened(option)}; {allowed_names(option, allowed)}"
            )
    return [LayerSpec(name, {x: y for x, y in options.items() if x in options_of[name]}) for name in names]


def mechanisms_in(attn_layer: LayerType | None) -> list[str]:
    """The known names in ``attn_layer``, a name, a pattern or a stack; empty for another class."""
    if is_stack(attn_layer):
        attn_layer = attn_layer.pattern
    items = attn_layer.split(",") if isinstance(attn_layer, str) else []
    return [name for name in (item.partition("*")[0].strip() for item in items) if name in ATTENTIONS]


def option_names(attn_layer: LayerType, also: str = "flow") -> set[str]:
    """Names of the options of the mechanisms in ``attn_layer``, and of ``also``."""
    return {option for name in [*mechanisms_in(attn_layer), also] for option in ATTENTIONS[name].Options.described()}


def stage_layers(spec: LayerSpec, grids: Sequence[Grid], dynamic: bool) -> list[LayerType]:
    """The layer of each stage; if it needs the number of tokens, for that of the stage's grid in ``grids``.

    Args:
        spec: an option has one value, or a list or tuple with one for each stage; None is its default. A class that
            has a number of tokens is used unchanged.
        dynamic: whether images may have any size.

    Raises:
        ValueError: an option that the mechanism does not have or allow; a mechanism that stores something for
            each position, with ``dynamic``; a pattern of more layers than there are stages.
    """
    layers = []
    for i, (stage, grid) in enumerate(zip(spec.for_layers(len(grids)), grids)):
        layer = _options_of_stage(stage, i, len(grids)).layer_class()
        if is_layer_class(layer) and layer.needs_tokens():
            if dynamic:
                raise ValueError(
                    f"dynamic_img_size is True; allowed with attention {layer.mechanism!r}, which holds something for "
                    "each position: False, and set_input_size for images of another size"
                )
            layer = layer.with_tokens(grid[0] * grid[1], grid)
        layers.append(layer)
    return layers


def _options_of_stage(spec: LayerSpec, stage: int, stages: int) -> LayerSpec:
    """The spec of one stage: its value of options that have one for each stage, and the defaults of ``BY_STAGE``."""
    options = {
        name: value[stage] if isinstance(value, (list, tuple)) and len(value) == stages else value
        for name, value in spec.options.items()
    }
    spec = spec._replace(options=options).without_defaults()
    by_stage = BY_STAGE.get(spec.attention) if isinstance(spec.attention, str) else None
    return spec if by_stage is None else spec._replace(options={**by_stage(stages - 1 - stage), **spec.options})


def check_stack(attn_layer: LayerType, model: nn.Module) -> None:
    """Raise ValueError unless ``model``, just built with the stack ``attn_layer``, has its layers in order.

    Other classes are not checked, and neither is a stack from which the model has made its own.
    """
    if not is_stack(attn_layer) or not attn_layer.made:
        return
    mechanisms = [spec.attention for spec in LayerSpec(attn_layer.pattern).for_layers(attn_layer.made)]
    built = [module.mechanism for module in model.modules() if isinstance(module, SelfAttention)]
    if built != mechanisms[: len(built)]:  # fewer if timm has removed blocks that features do not need
        raise ValueError(
            f"attn_layer is {attn_layer.pattern!r}, and {type(model).__name__} does not build its attentions in their "
            "order; allowed: one name, or timm_plugin.replace_attention(model, ...)"
        )
