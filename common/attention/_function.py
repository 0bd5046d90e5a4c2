"""Attention as one function of tensors: the class of a mechanism for it, with a default for all that it leaves out.

Legend: B batch, H heads, n tokens, d channels of q and k, e channels of v.
"""

import functools
import inspect
import math
import re
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import make_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.shared.checks import ArgumentError, check_choice, check_masks, check_query_key_value, shape_of, shortened
from ..ops.shared.kv_cache import extend_kv_cache
from ..ops.shared.packed import takes_segments
from ..ops.shared.padding import padding_or_none, put_back, real_first, take, zero_padding
from ..ops.shared.precision import autocast_off, compute_dtype
from ..ops.shared.state import State, check_continuation
from ..ops.shared.tracing import may_be_exported
from ._base import AttentionShape, OpAttention, Parameters
from ._options import AttentionOptions, flag, option

_TENSORS = ("q", "k", "v")
#: Arguments that a function may have beside tensors, options and parameters.
_GIVEN = ("causal", "key_padding_mask")
#: Names that hosts use for something else.
_RESERVED = {*AttentionShape._fields, "forget", "short_conv", "rotary", "query_padding_mask", "segment_ids", "x"}
#: Tokens with which a function is tried before it is trained, and the part of them that must not see the others.
_TRIED, _FIRST = 7, 4


@takes_segments(*_TENSORS)
def function_attention(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    *,
    function: Callable[..., Tensor],
    takes_mask: bool,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """``function`` of those of q, k (B, H, n, d) and v (B, H, n, e) that are given -> (B, H, n, e) in v's dtype.

    It gets float32 (float64 for float64), without autocast, 0 at padding. Unless it ``takes_mask``, tokens that
    ``key_padding_mask`` (B, n) hides are removed from each row before it. Padded queries give 0. The state of decoding
    has all tokens, and each step computes all outputs again.

    Raises:
        ValueError: a shape, mask or state that does not fit; another shape than v's from ``function``.
    """
    given = [x for x in (q, k, v) if x is not None]
    check_query_key_value(given[0], given[-2] if len(given) > 1 else v, v, one_length=True)
    check_masks(key_padding_mask, v, query_padding_mask, v)
    check_continuation(causal, initial_state, return_state)
    n, dtype = v.shape[2], compute_dtype(v)
    q = None if q is None else zero_padding(q, query_padding_mask)
    tensors = {name: x for name, x in zip(_TENSORS, (q, k, v)) if x is not None}
    state = None
    if return_state:
        state = extend_kv_cache(tensors, key_padding_mask, initial_state)
        key_padding_mask = padding_or_none(state["padding_mask"])
        tensors = {name: state[name] for name in tensors}
    with autocast_off(v):
        tensors = [zero_padding(x.to(dtype), key_padding_mask) for x in tensors.values()]
        if takes_mask:
            out = function(*tensors, key_padding_mask=key_padding_mask)
        else:
            out = _of_real_tokens(function, tensors, key_padding_mask, causal)
    if not isinstance(out, Tensor) or out.shape != tensors[-1].shape:
        raise ValueError(
            f"the function gives {shape_of(out)} for v {tuple(tensors[-1].shape)}; allowed: the shape of v"
        )
    out = zero_padding(zero_padding(out, key_padding_mask)[:, :, -n:], query_padding_mask).to(v.dtype)
    return (out, state) if return_state else out


def _of_real_tokens(
    function: Callable[..., Tensor], tensors: list[Tensor], padding_mask: Tensor | None, causal: bool
) -> Tensor:
    """``function`` of each row without its padding, and anything at padding."""
    if padding_mask is None:
        return function(*tensors)
    order = real_first(padding_mask)
    tensors = [take(x, order) for x in tensors]
    if causal or padding_mask.is_meta:  # no token sees the padding behind it; or there are only shapes
        return put_back(function(*tensors), order)
    if may_be_exported():
        raise ValueError(
            "key_padding_mask is given; allowed in torch.export: None, unless the function has an argument of that name"
        )
    run = torch.compiler.disable(_by_length) if torch.compiler.is_compiling() else _by_length
    return put_back(run(function, tensors, (~padding_mask).sum(1)), order)


def _by_length(function: Callable[..., Tensor], tensors: list[Tensor], lengths: Tensor) -> Tensor:
    """``function`` of rows whose first ``lengths`` (B,) tokens are real; rows of one length share a call."""
    out = torch.zeros_like(tensors[-1])
    for length in filter(None, lengths.unique().tolist()):
        rows = (lengths == length).nonzero().squeeze(1)
        part = function(*(x[rows, :, :length] for x in tensors))
        out = out.index_put((rows,), nn.functional.pad(part, (0, 0, 0, out.shape[2] - length)))
    return out


class FunctionAttention(OpAttention):
    """An ``OpAttention`` of a function of tensors; ``register_attention`` makes a subclass for each function."""

    linear_cost = False  # unknown, and the decoding state has all tokens
    op = staticmethod(function_attention)
    #: The function, its initial ``Parameters``, and which of its tensors and other arguments it has.
    function: ClassVar[Callable[..., Tensor]]
    initial: ClassVar[Parameters | None] = None
    arguments: ClassVar[frozenset[str]] = frozenset()

    def setup(self) -> None:
        """Build the parameters, and try the function."""
        for name, value in self._initial().items():
            self.register_parameter(name, nn.Parameter(value))
        self._try()

    @classmethod
    def try_out(cls) -> None:
        """Build it with its default options, which tries the function; ValueError if that fails."""
        for causal in sorted(what == "causal" for what in cls.supports):
            cls(causal, num_heads=2, head_dim=8)

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        with torch.no_grad():
            for name, value in self._initial().items():
                getattr(self, name).copy_(value)

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of those of q, k and v that the function has."""
        return {name: head_dim for name in _TENSORS if name in self.arguments}

    def op_kwargs(self) -> dict[str, Any]:
        """The function with options and parameters."""
        return {"function": self._bound(), "takes_mask": "key_padding_mask" in self.arguments}

    def extend(self, *tensors: Any, **inputs: Any) -> tuple[Tensor, State]:
        """The next tokens' outputs and a state with all tokens, from which everything is computed again."""
        warnings.warn(
            f"attention {self.name!r} declares no state: each step of decoding computes all tokens again", stacklevel=2
        )
        return super().extend(*tensors, **inputs)

    def _initial(self) -> Mapping[str, Tensor]:
        return {} if self.initial is None else type(self).initial(self.shape.num_heads, self.shape.head_dim)

    def _bound(self) -> Callable[..., Tensor]:
        causal = {"causal": self.causal} if "causal" in self.arguments else {}

        def function(*tensors: Tensor, **mask: Tensor | None) -> Tensor:
            parameters = {name: x.to(tensors[-1]) for name, x in self._parameters.items()}  # its dtype and device
            return type(self).function(*tensors, **mask, **causal, **self.options.as_dict(), **parameters)

        return function

    @torch.no_grad()
    def _try(self) -> None:
        """Raise ValueError unless outputs have v's shape and, if causal, do not depend on later tokens.

        In float32, on a CPU; torch's generator is left as it was.
        """
        if any(x.is_meta for x in self.parameters()) or torch.compiler.is_compiling():
            return
        generator = torch.Generator().manual_seed(1)
        shape = 2, self.shape.num_heads or 2, _TRIED, self.shape.head_dim or 8
        names = self.projections(1)
        with torch.device("cpu"), torch.random.fork_rng(devices=()):
            tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float32) for name in names}
            try:
                out, first = (self._tried({x: y[:, :, :n] for x, y in tensors.items()}) for n in (_TRIED, _FIRST))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                file = getattr(sys.modules.get(type(self).__module__), "__file__", None)
                lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == file]
                place = f" in line {lines[-1]} of {file}" if lines else ""
                raise ValueError(
                    f"attention {self.name!r} fails for {_TRIED} or {_FIRST} tokens{place}: {reason}"
                ) from error
        difference = float((out[:, :, :_FIRST] - first).abs().max())
        if self.causal and not difference <= 1e-4 * max(1.0, float(first.abs().max())):
            raise ValueError(
                f"causal is True, but outputs of attention {self.name!r} for the first {_FIRST} tokens change by "
                f"{difference:.2g} when {_TRIED - _FIRST} more follow; allowed: a function whose tokens see none after "
                'them, or supports={"bidirectional"}'
            )

    def _tried(self, tensors: dict[str, Tensor]) -> Tensor:
        torch.default_generator.manual_seed(1)
        arguments = [tensors.get(name) for name in _TENSORS]
        return function_attention(*arguments, causal=self.causal, **self.op_kwargs())


def function_class(
    name: str, function: Callable[..., Tensor], supports: Collection[str] | None, parameters: Parameters | None
) -> type[FunctionAttention]:
    """The mechanism called ``name`` that ``function`` computes; see ``register_attention``.

    Raises:
        ValueError: an argument of ``function`` that is no tensor, mask, option or parameter; ``supports`` with others
            than "causal" and "bidirectional".
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(f"name is {name!r}; allowed: small letters, digits and _, such as 'my_idea'")
    declared = inspect.signature(function).parameters
    drawn = set() if parameters is None else set(parameters(2, 8))
    tensors = tuple(x for x in declared if x in _TENSORS)
    if (
        tensors != tuple(x for x in _TENSORS if x in tensors)
        or "v" not in tensors
        or tensors != tuple(declared)[: len(tensors)]
    ):
        raise ValueError(
            f"{name} has the arguments {', '.join(declared)}; allowed first: those of q, k and v that it reads, in "
            "this order, and always v"
        )
    options = {x: y for x, y in declared.items() if x not in (*_TENSORS, *_GIVEN, *drawn)}
    if missing := drawn - declared.keys():
        raise ValueError(f"parameters of {name} has {min(missing)!r}; allowed: names of its arguments")
    if supports is None:
        supports = {"causal", "bidirectional"} if "causal" in declared else {"bidirectional"}
    for what in supports:
        check_choice("supports", what, ("causal", "bidirectional"))
    attributes = {
        "__doc__": function.__doc__ or f"``{function.__module__}.{function.__qualname__}``, a function of tensors.",
        "__module__": function.__module__,
        "__qualname__": f"{function.__qualname__}.Attention",
        "Options": _options_class(name, function, options),
        "supports": frozenset(supports),
        "needs": frozenset({"num_heads", "head_dim"} if parameters else ()),
        "function": staticmethod(function),
        "initial": None if parameters is None else staticmethod(parameters),
        "arguments": frozenset(declared),
    }
    title = "".join(part.capitalize() for part in name.split("_"))
    function.Attention = type(f"{title}Attention", (FunctionAttention,), attributes)  # where pickle looks for it
    return function.Attention


def _options_class(name: str, function: Callable, arguments: Mapping[str, inspect.Parameter]) -> type[AttentionOptions]:
    annotations = typing.get_type_hints(function)
    fields = []
    for argument, parameter in arguments.items():
        kind = annotations.get(argument)
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
        if argument in _RESERVED or parameter.default is inspect.Parameter.empty or not argument.islower():
            raise ValueError(
                f"{name} has the argument {argument!r}; allowed: q, k, v, {', '.join(_GIVEN)}, names of parameters, "
                f"and options with a default under other names than {', '.join(sorted(_RESERVED))}"
            )
        fields.append((argument, kind or Any, _option(name, argument, parameter.default, choices)))
    options = make_dataclass("Options", fields, bases=(AttentionOptions,), frozen=True)
    options.__module__, options.__qualname__ = function.__module__, f"{function.__qualname__}.Attention.Options"
    return options


def _option(name: str, argument: str, default: Any, choices: tuple[str, ...] | None) -> Any:
    """The field of an option of ``function`` by the type of its default."""
    help = f"the argument {argument} of {name}"
    if isinstance(default, bool):
        return flag(default, help, setup_only=True)
    if isinstance(default, str) and choices:
        return option(default, help, str, functools.partial(_choice, choices), choices, setup_only=True)
    kind = type(default)
    if kind not in (int, float):
        raise ValueError(
            f"{name} has the option {argument}={shortened(default)}; allowed: a number, True or False, or a text with "
            'typing.Literal["one", "two"]'
        )
    return option(default, help, kind, functools.partial(_number, kind), setup_only=True)


def _choice(choices: tuple[str, ...], name: str, value: Any) -> str:
    check_choice(name, value, choices)
    return value


def _number(kind: type, name: str, value: Any) -> int | float:
    try:
        number = float(value) if kind is float and isinstance(value, str) else value
    except ValueError:
        number = math.nan
    allowed = (int,) if kind is int else (int, float)
    if not isinstance(number, allowed) or isinstance(number, bool) or not math.isfinite(number):
        raise ArgumentError(f"`{name}` is {shortened(value)}; allowed: {'an integer' if kind is int else 'a number'}")
    return kind(number)
