"""The registry of mechanisms by name. Each file of this folder registers its own mechanism; no list is edited."""

from collections.abc import Callable, Collection
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from ._base import InnerAttention, Parameters

#: Every mechanism by name, in the alphabetical order of the files.
ATTENTIONS: dict[str, type[InnerAttention]] = {}

#: What hosts do with the name of each mechanism, when it is registered; see ``for_each_attention``.
_HOSTS: list[Callable[[str], None]] = []

_Attention = TypeVar("_Attention", bound=type[InnerAttention] | Callable)


def register_attention(
    name: str, *, supports: Collection[str] | None = None, parameters: Parameters | None = None
) -> Callable[[_Attention], _Attention]:
    """A decorator that registers a mechanism as ``name``, for ``build_attention`` and both hosts.

    It decorates a subclass of ``InnerAttention``, or a function ``f(q, k, v, *, causal, key_padding_mask, ...)`` of
    tensors (B, H, n, d) that gives one of v's shape. The function has those of q, k and v that it reads, ``causal`` and
    ``key_padding_mask`` if it distinguishes them, and options with defaults, from which command lines are derived:
    numbers, True or False, and texts with ``typing.Literal``. ``supports`` is {"causal"} or {"bidirectional"}; by
    default both if it has ``causal``, else the latter. ``parameters(H, d)`` gives initial values of learned tensors,
    which it receives by name. Without ``key_padding_mask``, padding is removed before it. Decoding computes all
    tokens again in each step. A class can declare more.

    Raises:
        ValueError: a name that is taken; an argument of the function that is none of these; a function that fails,
            gives another shape than v's, or is causal and sees later tokens.
    """

    def register(attention: _Attention) -> _Attention:
        if name in ATTENTIONS:
            present = ATTENTIONS[name]
            raise ValueError(
                f"attention {name!r} is {present.__module__}.{present.__qualname__} already; allowed: a new name"
            )
        kind = attention
        if not isinstance(attention, type):
            from ._function import function_class  # not above: a mechanism that is a class does not need it

            kind = function_class(name, attention, supports, parameters)
        kind.name = name
        if kind is not attention:
            kind.try_out()
        ATTENTIONS[name] = kind
        for host in _HOSTS:
            host(name)
        return attention

    return register


def for_each_attention(what: str, function: Callable[[str], None], images: bool = False) -> None:
    """Call ``function`` with the name of each mechanism of ``supporting``, now and when another one is registered."""

    def if_supporting(name: str) -> None:
        if name in supporting(what, images):
            function(name)

    for name in tuple(ATTENTIONS):
        if_supporting(name)
    _HOSTS.append(if_supporting)


def import_mechanisms(package: str, path: list[str]) -> None:
    """Import every file of the folder ``path`` of ``package`` that does not begin with an underscore."""
    for module in sorted(iter_modules(path), key=lambda x: x.name):
        if not module.name.startswith("_"):
            import_module(f"{package}.{module.name}")


def supporting(what: str, images: bool = False) -> tuple[str, ...]:
    """Names of the mechanisms that support ``what``, a key of ``SUPPORTS``; with ``images``, also those for images."""
    names = (name for name, kind in ATTENTIONS.items() if what in kind.supports)
    return tuple(name for name in names if images or "spatial_shape" not in ATTENTIONS[name].needs)
