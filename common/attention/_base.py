"""The contract between a mechanism and the hosts: its declarations, its inputs and its methods.

Legend: B batch, H heads, n queries, m keys, d channels of a head's query and key, e channels of its value, D width.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modules.stored_options import StoresOptions
from ..ops.shared.checks import (
    check_heads,
    check_key_value,
    check_padding_mask,
    check_positions,
    check_positive_int,
)
from ..ops.shared.state import State
from ._options import About, AttentionOptions

#: Features that a mechanism may support.
SUPPORTS = {
    "causal": "each token sees those before it and itself; decoding by `extend`",
    "bidirectional": "every token may attend to tokens before and after it",
    "cross": "n queries of one sequence attend to m keys of another, bidirectional",
    "source": "cross-attention through a state that `source_state` computes once; queries are independent",
    "torchscript": "not causal, it can be compiled by torch.jit.script, as some image models promise",
    "forget": "causal, its running sums can forget by gates, the further input `log_decay` of `ForgetAttention`",
    "rotary": "it rotates queries and keys itself, by its option `rotary`",
}
#: A mechanism may need these from a host in addition to q, k and v: facts for its constructor, inputs of each call.
FACTS = ("num_heads", "head_dim", "max_tokens")
INPUTS = {
    "x": "the tokens (B, n, D) before their projection",
    "source_q": "queries of the keys' own tokens (B, H, m, d), for keys of another sequence than the queries are of",
    "spatial_shape": "rows and columns of an image's tokens, (height, width)",
    "log_decay": "gates of its sums, at most 0: (B, H, n), or (B, H, n, features of a key), from `ForgetAttention`",
}
#: Initial values of a function's parameters by name, from the numbers of heads H and of channels of a head d.
Parameters = Callable[[int, int], Mapping[str, Tensor]]


class NoReference(ValueError):
    """The error of ``reference`` of a mechanism without a literal formula."""


class AttentionShape(NamedTuple):
    """Facts that a host knows about the attention it builds; every mechanism receives all of them."""

    causal: bool = False
    num_heads: int | None = None  # H
    head_dim: int | None = None  # d
    max_tokens: int | None = None  # of the longest sequence
    spatial_dims: int = 1  # 1 for a sequence, 2 for the rows and columns of an image


class InnerAttention(StoresOptions):
    """(q, k, v) -> out between a host's projections: the base class of every mechanism.

    Args:
        causal: whether a token sees only those before it and itself.
        num_heads, head_dim: H and d, which a host always gives; needed where ``needs`` says so.
        max_tokens: the longest sequence; needed where ``needs`` says so.
        spatial_dims: 1 for sequences, 2 for images.
        options: fields of the class's ``Options``.

    A mechanism is an ``OpAttention``. ``ForgetAttention``, ``RotaryAttention`` and ``ShortConvAttention`` can wrap it,
    in this order from the inside. Each class declares ``Options``, ``supports`` and ``needs``, builds its parameters in
    ``setup``, and has:

    ``forward(q, k, v, key_padding_mask=None, query_padding_mask=None, dropout_p=0.0, segment_ids=None) -> out``:
    attention over whole sequences. q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e), heads already split.
    Masks are bool, (B, m) for keys and (B, n) for queries, True = padding; a padded query gives 0. ``dropout_p`` is
    applied in training and in evaluation, since the host decides when to use it. ``segment_ids`` (B, n), integers that
    never decrease along a row, number its packed documents, which do not see each other; positions restart with each.
    The inputs that ``needs`` names are further keywords.

    ``extend(q, k, v, padding_mask=None, state=None, segment_ids=None, dropout_p=0.0) -> (out, state)``, where it
    supports "causal": attention from the next tokens of a sequence, one or many. ``padding_mask`` (B, n) covers these
    tokens only; ``state`` None starts a sequence. Every tensor of a state has the batch as dimension 0.

    ``_source_state(k, v, key_padding_mask) -> state`` and ``_attend_source(q, state, padding_mask, positions) -> out``,
    where it supports "source": the implementations behind ``source_state`` and ``attend_source``, which check the
    tensors. The inputs that ``needs`` names are further keywords of ``_source_state``.

    ``reference(q, k, v, key_padding_mask=None, query_padding_mask=None) -> out``: the paper's formula, literally and
    slowly, with this module's parameters and options; faster implementations are compared with it.

    Raises:
        ValueError: an option that the mechanism does not have or a value it does not allow; ``causal`` or images where
            it does not support them; a missing fact that it needs. ``torch.jit.script`` of a mechanism that does not
            support "torchscript".
    """

    # torch.jit.trace cannot type these attributes where an instance overrides them.
    __jit_ignored_attributes__ = ("about", "name", "needs", "supports")
    #: The name in the registry, set by ``register_attention``.
    name: ClassVar[str] = ""
    #: Title, paper and cost, for people.
    about: ClassVar[About | None] = None
    #: The dataclass of the options.
    Options: ClassVar[type[AttentionOptions]] = AttentionOptions
    #: Keys of ``SUPPORTS``.
    supports: ClassVar[frozenset[str]] = frozenset({"causal", "bidirectional"})
    #: Names of ``FACTS`` and of ``INPUTS``.
    needs: frozenset[str] = frozenset()
    #: Options that can be read off tensors of the state dict, so that the record of options omits them.
    shown_by_weights: ClassVar[frozenset[str]] = frozenset()
    #: Whether time and memory are linear in the tokens, up to a logarithm, and the decoding state has a bounded size.
    linear_cost: bool = True
    #: Whether, with any options, each output is a weighted mean of the values of all visible tokens: the weights of a
    #: query are at least 0, no weight is always 0, and they sum to 1, as in softmax attention, or to less where the
    #: normaliser has a lower bound.
    weighted_mean: ClassVar[bool] = False
    #: Whether, if not causal, permuting the tokens permutes the outputs in the same way: tokens are a set, without
    #: positions, neighbours or a grid.
    permutation_equivariant: ClassVar[bool] = False
    #: Whether, without gates, its state consists of sums: the states of two parts add up to that of the whole sequence.
    sums_add_up: ClassVar[bool] = False
    #: ``attend_part(q, k, v, padding_mask, before, sums_before) -> out``, if all parts of a sequence can be computed at
    #: the same time while exchanging sums; see ``ops.flow.parts``.
    attend_part: Callable[..., Tensor] | None = None
    #: Inside ``common.parallel.context_parallel``, the ``Context`` of this process's part of a sequence; else None.
    context: Any = None
    #: Whether training redraws random numbers that states depend on, so that a state is useless to another pass.
    redraws: bool = False

    def __init__(
        self,
        causal: bool = False,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        max_tokens: int | None = None,
        spatial_dims: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.shape = AttentionShape(causal, num_heads, head_dim, max_tokens, spatial_dims)
        self._check_shape()
        self.options = self.Options.read(self.name, options)
        self.setup()

    def setup(self) -> None:
        """Build parameters and buffers from ``self.shape`` and ``self.options``; does nothing by default."""

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of a host's projections "q", "k" and "v". A tensor without an entry here is None."""
        return {"q": head_dim, "k": head_dim, "v": head_dim}

    def key_features(self, head_dim: int) -> int:
        """Features of a head's key, the rows of its running sums; used where it supports "forget"."""
        return head_dim

    def state_tokens(self) -> int | None:
        """The largest number of tokens that a decoding state has entries for; None if it has entries for all tokens.

        After n tokens the state has entries for at most min(n, this number), and sums whose size is independent of n.
        """
        return 0 if self.linear_cost else None

    def linear_weights(self) -> tuple[str, ...]:
        """Names of parameters that are weights of linear layers, but not of an ``nn.Linear``; for weight decay."""
        return ()

    @classmethod
    def packs_documents(cls) -> bool:
        """Whether it accepts ``segment_ids``, the documents of a row."""
        return False

    def stored_options(self) -> dict[str, Any]:
        """Return the mechanism's name, whether it is causal, its heads, and the options that change its outputs.

        With other values of these, the same weights give other outputs. Options that change only speed are omitted,
        and so are those that can be read off tensors of the state dict (``shown_by_weights``).
        """
        described = self.options.described()
        options = {
            name: value
            for name, value in self.options.as_dict().items()
            if not described[name].speed_only and name not in self.shown_by_weights
        }
        heads = {} if self.shape.num_heads is None else {"num_heads": self.shape.num_heads}
        return {"attention": self.name or type(self).__name__, "causal": self.causal, **heads, **options}

    def stored_module(self) -> str | None:
        """Return the module of a mechanism that is not part of this package, which must be imported to build it."""
        module = type(self).__module__
        return None if module.startswith(f"{__package__}.") else module

    def inputs(self, **available: Any) -> dict[str, Any]:
        """Select the inputs that this module needs from all those that a host can provide, by name."""
        return {name: value for name, value in available.items() if name in self.needs}

    def __prepare_scriptable__(self) -> "InnerAttention":
        """torch's hook of ``torch.jit.script``, called for each submodule; ValueError if it does not support that."""
        if "torchscript" not in self.supports:
            raise ValueError(
                f"attention is {self.name or type(self).__name__!r}; allowed for torch.jit.script: flow, daft_full and "
                "daft_conv, by themselves. torch.compile and torch.export take every attention"
            )
        return self

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        segment_ids: Tensor | None = None,
        dropout_p: float = 0.0,
        **inputs: Any,
    ) -> tuple[Tensor, State]:
        """Raise ValueError; a mechanism that supports "causal" overrides it."""
        raise ValueError(f"causal is {self.causal}; attention {self.name!r} does not decode; allowed: forward alone")

    def source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, **inputs: Tensor) -> State:
        """State of a source k (B, H, m, d), v (B, H, m, e) for ``attend_source``; its size is independent of m. O(m).

        ``key_padding_mask`` (B, m), True = padding; ``inputs`` are those that ``needs`` names. Sums are float32
        (float64 for float64 inputs), and every tensor has the batch as dimension 0.

        Raises:
            ValueError: the mechanism does not support "source", was built with ``causal=True``, or is RFA in training,
                where each pass draws new directions; or the tensors do not fit.
        """
        self._check_source()
        check_key_value(k, v)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        return self._source_state(k, v, key_padding_mask, **inputs)

    def attend_source(
        self, q: Tensor, state: State, query_padding_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """``forward`` of q (B, H, n, d) and the source of ``state`` -> (B, H, n, e) in q's dtype; O(n) for any m.

        No query's output depends on another query. ``query_padding_mask`` (B, n), True = padding. ``positions`` (B, n),
        int64, are the positions of the queries among the real tokens of their sequence, from 0. Decoding must pass them
        where they matter (cosFormer); None counts them by the mask.

        Raises:
            ValueError: as ``source_state``; a state that does not fit.
        """
        self._check_source()
        check_heads("q", q)
        check_padding_mask("query_padding_mask", query_padding_mask, q)
        check_positions(positions, q)
        return self._attend_source(q, state, query_padding_mask, positions)

    def _check_source(self) -> None:
        if "source" not in self.supports:
            name = self.name or type(self).__name__
            raise ValueError(f"attention is {name!r}, which makes no state of a source; allowed: forward alone")
        if self.causal:
            raise ValueError("causal is True; allowed for source_state and attend_source: causal=False")

    def _check_shape(self) -> None:
        name = self.name or type(self).__name__
        if not self.supports & ({"causal"} if self.causal else {"bidirectional", "source"}):
            raise ValueError(f"causal is {self.causal}; allowed for attention {name!r}: {not self.causal}")
        allowed = {1: "1 for sequences"} if "spatial_shape" not in self.needs else {}
        allowed |= {2: "2 for images"} if "bidirectional" in self.supports else {}
        if self.shape.spatial_dims not in allowed:
            kinds = " or ".join(allowed.values())
            raise ValueError(f"spatial_dims is {self.shape.spatial_dims}; allowed for attention {name!r}: {kinds}")
        for fact in FACTS:
            value = getattr(self.shape, fact)
            if value is not None:
                check_positive_int(fact, value)
            elif fact in self.needs:
                raise ValueError(f"{fact} is None; allowed for attention {name!r}: an integer of at least 1")

    def extra_repr(self) -> str:
        """Facts and options that the module was built with, for ``print(model)``."""
        facts = {name: value for name, value in self.shape._asdict().items() if name in ("causal", *self.needs)}
        return ", ".join(f"{name}={value!r}" for name, value in {**facts, **self.options.as_dict()}.items())


class OpAttention(InnerAttention):
    """An ``InnerAttention`` that calls one public function of ``common.ops``, which checks its tensors at each call.

    Subclasses name the function, ``op``, and its literal form, ``reference_op``, if there is one. Both are called with
    the tensors that ``op_inputs`` names, with ``key_padding_mask`` and ``query_padding_mask``, and by name with

    * ``causal``, where the mechanism may be causal,
    * the options, except those that only ``setup`` reads (``setup_only``) and, for ``reference_op``, those of speed,
    * the module's parameters and buffers: ``op_kwargs()``, or ``reference_kwargs()`` for ``reference_op``,
    * the inputs that ``needs`` names,
    * for ``op`` on the next part of a causal sequence, ``initial_state`` and ``return_state``,
    * for ``op`` on packed documents, ``segment_ids``.
    """

    op: Callable
    reference_op: Callable | None = None
    #: The tensors that ``op`` accepts, in order. A tensor without an entry in ``projections`` is None.
    op_inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def __init__(self, causal: bool = False, **facts_and_options: Any) -> None:
        super().__init__(causal, **facts_and_options)
        self._declare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``, which may come from a pickle of another version."""
        super().__setstate__(state)
        self._declare()

    def _declare(self) -> None:
        """Cache the arguments of ``op`` and ``reference_op`` that never change, and the names of projected tensors."""
        described = self.options.described()
        causal = {"causal": self.causal} if "causal" in self.supports else {}
        options = {name: x for name, x in self.options.as_dict().items() if not described[name].setup_only}
        results = {name: x for name, x in options.items() if not described[name].speed_only}
        self._arguments, self._reference_arguments = {**causal, **options}, {**causal, **results}
        self._projected = frozenset(self.projections(1))
        op = type(self).op
        self._kind_of = op.kind_of if hasattr(op, "step") and op.has_steps(type(self)) else None
        self._known: list | None = None  # the kind of the last tensors of one token, if ``apply_step`` may compute such

    def _apply(self, fn: Callable, recurse: bool = True) -> "OpAttention":
        """torch's hook of ``to``, ``double`` and others, which change the kind of the parameters."""
        self._known = None
        return super()._apply(fn, recurse)

    @classmethod
    def packs_documents(cls) -> bool:
        """Whether ``op`` accepts ``segment_ids``."""
        return "segment_ids" in inspect.signature(cls.op).parameters

    def op_kwargs(self) -> dict[str, Any]:
        """Further arguments of ``op`` in this call: facts, parameters, buffers."""
        return {}

    def reference_kwargs(self) -> dict[str, Any]:
        """Further arguments of ``reference_op`` in this call: ``op_kwargs()``, unless a subclass overrides it."""
        return self.op_kwargs()

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        segment_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e); see ``InnerAttention``."""
        arguments = {**self._needed(inputs), **self.packing(segment_ids)}
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        v = drop_sources(v, dropout_p)
        if self.context is not None:
            return self.context.attend(self, (q, k, v), **masks, inputs=arguments)
        return self.apply_op(*self.operands(q, k, v), **masks, **arguments)

    def extend(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        segment_ids: Tensor | None = None,
        dropout_p: float = 0.0,
        **inputs: Any,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; the cost depends on the mechanism.

        A dropped source stays dropped for later tokens, since the state does not contain it.
        """
        if not self.causal:
            raise ValueError("causal is False; allowed for extend: an attention built with causal=True")
        kind = None
        if self._kind_of and padding_mask is segment_ids is None and dropout_p == 0.0 and type(state) is dict:
            kind = self._kind_of({"q": q, "k": k, "v": v, **inputs}, state)
            if kind is not None and kind == self._known:
                return self.apply_step(q, k, v, state, **inputs)
        tensors = self.operands(q, k, drop_sources(v, dropout_p))
        if padding_mask is not None:  # checked here, since op has other names for it
            check_heads("v", v)
            check_padding_mask("padding_mask", padding_mask, v)
        masks = {"key_padding_mask": padding_mask, "query_padding_mask": padding_mask}
        arguments = {**self._needed(inputs), **self.packing(segment_ids)}
        result = self.apply_op(*tensors, **masks, **arguments, initial_state=state, return_state=True)
        if kind and v.shape[2] == 1 and all(x.shape == state[name].shape for name, x in result[1].items()):  # not grown
            numbers = (q, k, v, *inputs.values(), *state.values(), *self.parameters())
            self._known = kind if type(self).op.applies(*numbers) else None
        return result

    def apply_step(self, q: Tensor, k: Tensor, v: Tensor, state: State, **inputs: Tensor) -> tuple[Tensor, State]:
        """``extend`` by one token, whose tensors are of a kind that ``extend`` has checked and computed by kernels."""
        return type(self).op.step(q, k, v, state, **inputs, **self._arguments, **self.op_kwargs())

    def reference(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """The literal formula, slowly; shapes and masks as in ``forward``."""
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return self.apply_reference(*self.operands(q, k, v), **masks, **self._needed(inputs))

    def attention_matrix(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """The matrix (B, H, n, m) with matrix @ v = ``forward``; ``record_attention(model, maps=True)`` records it.

        Without attention dropout. Costs m / e calls of ``forward`` and O(n m) memory: for short inputs.
        """
        from ..ops.shared.attention_matrix import read_attention_matrix  # for this alone

        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        arguments = {**self._needed(inputs), **self.packing(segment_ids)}
        return read_attention_matrix(
            lambda values: self.linear_op(*self.operands(q, k, values), **masks, **arguments), v
        )

    def linear_op(self, *tensors: Tensor | None, **arguments: Any) -> Tensor:
        """The part of ``apply_op`` that is linear in the values: all of it, unless a subclass overrides this."""
        return self.apply_op(*tensors, **arguments)

    def apply_op(self, *tensors: Tensor | None, **arguments: Any) -> Any:
        """Call ``op`` with its tensors (``operands``) and all of its arguments."""
        return type(self).op(*tensors, **arguments, **self._arguments, **self.op_kwargs())

    def apply_reference(self, *tensors: Tensor | None, **arguments: Any) -> Tensor:
        """Call ``reference_op`` with the same tensors and all of its arguments; ValueError if there is none."""
        if self.reference_op is None:
            raise NoReference(f"attention {self.name!r} has no reference_op; allowed for reference: a class with one")
        return type(self).reference_op(*tensors, **arguments, **self._reference_arguments, **self.reference_kwargs())

    def operands(self, q: Tensor | None, k: Tensor | None, v: Tensor) -> tuple[Tensor | None, ...]:
        """The tensors that ``op`` accepts; ValueError if a projected tensor is None, or another one is not None."""
        for name, tensor in (("q", q), ("k", k)):
            if (tensor is None) == (name in self._projected):
                is_given, allowed = ("None", "a tensor") if tensor is None else ("given", "None")
                options = "".join(f" {option}={x!r}" for option, x in self.options.as_dict().items())
                raise ValueError(f"{name} is {is_given}; allowed for attention {self.name!r}{options}: {allowed}")
        if len(self.op_inputs) == 3:
            return q, k, v
        tensors = {"q": q, "k": k, "v": v}
        return tuple(tensors[name] for name in self.op_inputs)

    def packing(self, segment_ids: Tensor | None) -> dict[str, Tensor]:
        """``segment_ids`` as an argument of ``op``, if given; ValueError if ``op`` does not accept it."""
        if segment_ids is None:
            return {}
        if self.context is not None:
            raise ValueError("segment_ids is given; allowed where several processes hold one sequence: None")
        if not self.packs_documents():
            raise ValueError(f"segment_ids is given; allowed for attention {self.name!r}: None, no packed documents")
        return {"segment_ids": segment_ids}

    def _needed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The ``inputs`` that are not None; ValueError unless they are exactly those that ``needs`` names."""
        inputs = {name: x for name, x in inputs.items() if x is not None}
        required = {name for name in INPUTS if name in self.needs}
        if self.causal and "forget" in self.supports and "log_decay" in inputs:
            required.add("log_decay")
        if inputs.keys() == required:
            return inputs
        name = min(inputs.keys() ^ required)
        is_given, allowed = ("is given", "without it") if name in inputs else ("is None", f"{INPUTS.get(name)}")
        raise ValueError(f"{name} {is_given}; allowed for attention {self.name!r}: {allowed}")


def drop_sources(v: Tensor, dropout_p: float) -> Tensor:
    """Attention dropout in linear time: whole sources of v (B, H, m, e) are dropped, the rest scaled by 1/(1-p).

    Dropping entries of the attention map one by one would need the map; this drops the same columns for every query.
    """
    if dropout_p == 0.0:
        return v
    return v * F.dropout(torch.ones_like(v[..., :1]), dropout_p)
