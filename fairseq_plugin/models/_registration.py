"""Models derived from the declarations of mechanisms: their names, classes and registration."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, register_model

from common.attention import ATTENTIONS, build_attention, for_each_attention

from ._configuration import readable
from ._options import camel_case
from ._weight_decay import choose_optimizer

#: Additional names of mechanisms in names of models.
FURTHER_NAMES = {"flow": ("flowformer",)}


def derive(what: str, register: Callable[[str, str], None]) -> None:
    """Call ``register(prefix, mechanism)`` for each name in models of every mechanism that supports ``what``.

    ``what`` is "causal" or "bidirectional". A mechanism that is registered later gets its models then.
    """

    def with_names(attention: str) -> None:
        for prefix in (attention, *FURTHER_NAMES.get(attention, ())):
            register(prefix, attention)

    for_each_attention(what, with_names)


@cache
def takes_stock_weights(attention: str) -> bool:
    """Whether a layer with ``attention`` has the projections of fairseq's own layer, possibly with others."""
    supports, shape = ATTENTIONS[attention].supports, {"num_heads": 1, "head_dim": 8, "max_tokens": 8}
    kinds = [causal for causal, what in ((False, "bidirectional"), (True, "causal")) if what in supports]
    modules = [build_attention(attention, causal, **shape) for causal in kinds]
    return all(x.projections(8) == {"q": 8, "k": 8, "v": 8} for x in modules)


def make_class(module: str, name: str, *bases: type, **attributes: Any) -> type:
    """A subclass of ``bases`` that is an attribute of ``module``, so that pickle finds it."""
    new_class = type(name, bases, {"__module__": module, "__doc__": bases[0].__doc__, **attributes})
    setattr(sys.modules[module], name, new_class)
    return new_class


def make_config(module: str, name: str, options: type, further: type) -> type:
    """A dataclass with the fields of ``options``, those of the mechanism, and of ``further``."""
    return dataclass(make_class(module, name, options, further))


def make_model(module: str, name: str, base: type, attention: str, options: type, **attributes: Any) -> type:
    """A subclass of ``base`` with the mechanism ``attention``, whose options are fields of ``options``."""
    declared = {"attention_name": attention, "option_prefix": attention, "options_class": options}
    return make_class(module, name, base, **declared, **attributes)


def register_checked(
    name: str, dataclass: type, check: Callable[[Any], None] = choose_optimizer
) -> Callable[[type], type]:
    """fairseq's ``register_model`` for a model with a ``dataclass``; ``check`` is called on its parsed command line.

    A configuration of hydra is read by ``_configuration``.
    """

    def register(model: type) -> type:
        model = register_model(name, dataclass=dataclass)(model)
        MODEL_DATACLASS_REGISTRY[name] = readable(dataclass, name)
        ARCH_CONFIG_REGISTRY[name] = check  # fairseq's entry for a model with a dataclass does nothing
        return model

    return register


def register_variant(
    prefix: str,
    kind: str,
    attention: str,
    base: type,
    options: type,
    further: type,
    check: Callable[[Any], None] = choose_optimizer,
    **attributes: Any,
) -> None:
    """Register ``prefix``_``kind``, a subclass of ``base`` with ``attention`` and the fields of both dataclasses.

    The class name ends with the last word of the name of ``base``. ``check`` is that of ``register_checked``, and
    ``attributes`` are attributes of the class.
    """
    name = f"{camel_case(prefix)}{camel_case(kind)}"
    config = make_config(base.__module__, f"{name}Config", options, further)
    last_word = base.__name__.rpartition(camel_case(kind))[2]
    model = make_model(base.__module__, f"{name}{last_word}", base, attention, config, **attributes)
    register_checked(f"{prefix}_{kind}", config, check)(model)
