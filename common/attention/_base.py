"""The contract between a mechanism and the hosts: what it declares, what it is given, and what it computes.

Legend: B batch, H heads, n queries, m keys, d channels of a head's query and key, e channels of its value, D width.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modules.remembered_options import RemembersOptions
from ..ops.shared.attention_matrix import read_attention_matrix
from ..ops.shared.checks import (
    check_heads,
    check_key_value,
    check_padding_mask,
    check_positions,
    check_positive_int,
)
from ..ops.shared.state import State
from ._about import About
from ._options import AttentionOptions

#: What a mechanism may support.
SUPPORTS = {
    "causal": "each token sees those before it and itself; decoding by `extend`",
    "bidirectional": "each token sees all tokens",
    "cross": "n queries of one sequence attend to m keys of another, bidirectional",
    "source": "cross-attention through a state that `source_state` computes once; queries are independent",
    "torchscript": "not causal, it can be compiled by torch.jit.script, as some image models promise",
    "forget": "causal, its running sums can forget by gates, the further input `log_decay` of `ForgetAttention`",
    "rotary": "it rotates queries and keys itself, by its option `rotary`",
}
#: What a mechanism may need of a host beside q, k and v: facts for its constructor, then inputs of every call.
FACTS = ("num_heads", "head_dim", "max_tokens")
INPUTS = {
    "x": "the tokens (B, n, D) before their projection",
    "source_q": "queries of the keys' own tokens (B, H, m, d), for keys of another sequence than the queries are of",
    "spatial_shape": "rows and columns of an image's tokens, (height, width)",
    "log_decay": "gates of its sums, at most 0: (B, H, n), or (B, H, n, features of a key), from `ForgetAttention`",
}


class AttentionShape(NamedTuple):
    """Facts that a host knows of the attention it builds; every mechanism is given all of them."""

    causal: bool = False
    num_heads: int | None = None  # H
    head_dim: int | None = None  # d
    max_tokens: int | None = None  # of the longest sequence
    spatial_dims: int = 1  # 1 for a sequence, 2 for the rows and columns of an image


class InnerAttention(RemembersOptions):
    """(q, k, v) -> out between a host's projections: the base class of every mechanism.

    Args:
        causal: whether a token sees only those before it and itself.
        num_heads, head_dim: H and d, which a host always gives; needed where ``needs`` says so.
        max_tokens: the longest sequence; needed where ``needs`` says so.
        spatial_dims: 1 for sequences, 2 for images.
        options: fields of the class's ``Options``.

    A mechanism is an ``OpAttention``; around one stand ``ForgetAttention``, ``RotaryAttention`` and
    ``ShortConvAttention``, in this order from the inside. Each declares
    ``Options``, ``supports`` and ``needs``, builds its parameters in ``setup``, and has:

    ``forward(q, k, v, key_padding_mask=None, query_padding_mask=None, dropout_p=0.0, segment_ids=None) -> out``:
    attention over whole sequences. q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e), heads already split.
    Masks are bool, (B, m) for keys and (B, n) for queries, True = padding; a padded query gives 0. ``dropout_p`` is
    applied in either mode of the module, since hosts decide that themselves. ``segment_ids`` (B, n), integers that
    never decrease along a row, are its documents, none of which sees another; positions begin anew with each. The
    inputs that ``needs`` names are further keywords.

    ``extend(q, k, v, padding_mask=None, state=None, segment_ids=None, dropout_p=0.0) -> (out, state)``, where it
    supports "causal": attention from the next tokens of a sequence, one or many. ``padding_mask`` (B, n) is theirs
    alone, ``state`` None starts a sequence. Every tensor of a state has the batch as dimension 0.

    ``_source_state(k, v, key_padding_mask) -> state`` and ``_attend_source(q, state, query_padding_mask, positions) ->
    out``, where it supports "source": ``source_state`` and ``attend_source``, which check their tensors. The inputs
    that ``needs`` names are further keywords of the former.

    ``reference(q, k, v, key_padding_mask=None, query_padding_mask=None) -> out``: the paper's formula, literally and
    slowly, with this module's parameters and options; what everything faster is compared with.

    Raises:
        ValueError: an option that the mechanism does not have or a value it does not allow; ``causal`` or images where
            it does not support them; a fact that it needs and that is not given. ``torch.jit.script`` of a mechanism
            that does not support "torchscript".
    """

    # torch.jit.trace has no type for these where an instance has its own.
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
    #: Options that tensors of the state dict show, so that they need not be remembered.
    shown_by_weights: ClassVar[frozenset[str]] = frozenset()
    #: Whether time and memory are linear in the tokens, up to a logarithm, and the decoding state has a largest size.
    linear_cost: bool = True
    #: Whether each output is a mean of the values of all tokens that are seen, with any options: the weights of a query
    #: are at least 0, none is 0 whatever the tokens are, and their sum is 1, as in softmax attention, or less where a
    #: normaliser is kept from 0.
    weighted_mean: ClassVar[bool] = False
    #: Whether tokens in another order, not causal, have the same outputs in that order: they are a set, without
    #: positions, neighbours or a grid.
    permutation_equivariant: ClassVar[bool] = False
    #: Whether, without gates, its state is sums that add up: the state of all tokens is that of one part and another.
    sums_add_up: ClassVar[bool] = False
    #: ``attend_part(q, k, v, padding_mask, before, sums_before) -> out``, where all parts of a sequence can be computed
    #: at the same time, if sums are exchanged on the way; see ``ops.flow.parts``.
    attend_part: Callable[..., Tensor] | None = None
    #: Inside of ``common.parallel.context_parallel``: what it needs to compute a part of a sequence, a ``Context``.
    context: Any = None
    #: Whether training draws anew what states depend on: a state is of no use to another pass.
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
        """Build parameters and buffers from ``self.shape`` and ``self.options``; nothing where there are none."""

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of what a host projects tokens to: "q", "k" and "v". One that is left out is None."""
        return {"q": head_dim, "k": head_dim, "v": head_dim}

    def key_features(self, head_dim: int) -> int:
        """Features of a head's key, by which running sums have their rows; where it supports "forget"."""
        return head_dim

    def state_tokens(self) -> int | None:
        """The largest number of tokens that a decoding state has entries for; None if it has entries for all tokens.

        After n tokens it has entries for min(n, that number), and sums whose size does not depend on n.
        """
        return 0 if self.linear_cost else None

    @classmethod
    def packs_documents(cls) -> bool:
        """Whether it takes ``segment_ids``, the documents of a row."""
        return False

    def remembered_options(self) -> dict[str, Any]:
        """Return the mechanism's name, whether it is causal, its heads, and the options that change its outputs.

        With other values of these, the same weights give other outputs. Options that change speed alone are left out,
        and so are those that tensors of the state dict show (``shown_by_weights``).
        """
        described = self.options.described()
        options = {
            name: value
            for name, value in self.options.as_dict().items()
            if not described[name].speed_only and name not in self.shown_by_weights
        }
        heads = {} if self.shape.num_heads is None else {"num_heads": self.shape.num_heads}
        return {"attention": self.name or type(self).__name__, "causal": self.causal, **heads, **options}

    def inputs(self, **available: Any) -> dict[str, Any]:
        """Select from the inputs that a host can give, by name, those that this module takes."""
        return {name: value for name, value in available.items() if name in self.needs}

    def __prepare_scriptable__(self) -> "InnerAttention":
        """torch's hook of ``torch.jit.script``, for a module and all in it; ValueError for what has no TorchScript."""
        if "torchscript" not in self.supports:
            name = self.name or type(self).__name__
            raise ValueError(
                f"attention is {name!r}; allowed for torch.jit.script: flow, daft_full and daft_conv, by themselves. "
                "torch.compile and torch.export take every attention"
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
        """Refused with a ValueError; a mechanism that supports "causal" defines it."""
        raise ValueError(f"causal is {self.causal}; attention {self.name!r} does not decode; allowed: forward alone")

    def source_state(self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, **inputs: Tensor) -> State:
        """State of a source k (B, H, m, d), v (B, H, m, e) for ``attend_source``, of one size for any m; O(m) time.

        ``key_padding_mask`` (B, m), True = padding; ``inputs`` are those that ``needs`` names. Sums are float32
        (float64 for float64 inputs), and every tensor has the batch as dimension 0.

        Raises:
            ValueError: the mechanism does not support "source", was built with ``causal=True``, or is RFA in training,
                where each pass draws other directions; or the tensors do not fit.
        """
        self._check_source()
        check_key_value(k, v)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        return self._source_state(k, v, key_padding_mask, **inputs)

    def attend_source(
        self, q: Tensor, state: State, query_padding_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """``forward`` of q (B, H, n, d) and the source of ``state`` -> (B, H, n, e) in q's dtype; O(n), whatever m is.

        No query's output depends on another query. ``query_padding_mask`` (B, n), True = padding. ``positions`` (B, n),
        int64, are the numbers of the queries among the real tokens of their sequence, from 0, which decoding has to
        say where they matter (cosFormer); None counts them by the mask.

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
        wanted = {"causal"} if self.causal else {"bidirectional", "source"}
        if not wanted & self.supports:
            raise ValueError(f"causal is {self.causal}; allowed for attention {name!r}: {not self.causal}")
        allowed = {1: "1 for sequences"} if "spatial_shape" not in self.needs else {}
        allowed |= {2: "2 for images"} if "bidirectional" in self.supports else {}
        if self.shape.spatial_dims not in allowed:
            kinds = " or ".join(allowed.values())
            raise ValueError(f"spatial_dims is {self.shape.spatial_dims}; allowed for attention {name!r}: {kinds}")
        for fact in FACTS:
            value = getattr(self.shape, fact)
            if value is None and fact not in self.needs:
                continue
            if value is None:
                raise ValueError(f"{fact} is None; allowed for attention {name!r}: an integer of at least 1")
            check_positive_int(fact, value)

    def extra_repr(self) -> str:
        """Facts and options that the module was built with, for ``print(model)``."""
        facts = {name: value for name, value in self.shape._asdict().items() if name in ("causal", *self.needs)}
        return ", ".join(f"{name}={value!r}" for name, value in {**facts, **self.options.as_dict()}.items())


class OpAttention(InnerAttention):
    """An ``InnerAttention`` that is one public function of ``common.ops``, which checks its tensors at each call.

    Subclasses name the function, ``op``, and its literal form, ``reference_op``. Both are called with the tensors that
    ``op_inputs`` names, with ``key_padding_mask`` and ``query_padding_mask``, and by name with

    * ``causal``, where the mechanism may be causal,
    * the options, but those that ``setup`` alone reads (``setup_only``), and for ``reference_op`` those of speed,
    * what the module holds: ``op_kwargs()``, and ``reference_kwargs()`` for ``reference_op``,
    * the inputs that ``needs`` names,
    * for ``op`` of a causal sequence in parts, ``initial_state`` and ``return_state``,
    * for ``op`` of packed documents, ``segment_ids``.
    """

    op: Callable
    reference_op: Callable
    #: The tensors that ``op`` takes, in their order. One that ``projections`` leaves out is None.
    op_inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def __init__(self, causal: bool = False, **facts_and_options: Any) -> None:
        super().__init__(causal, **facts_and_options)
        self._declare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over ``state``, which may be the pickle of another version."""
        super().__setstate__(state)
        self._declare()

    def _declare(self) -> None:
        """Set what does not change between calls: arguments of ``op`` and ``reference_op``, and projected tensors."""
        described = self.options.described()
        causal = {"causal": self.causal} if "causal" in self.supports else {}
        options = {name: x for name, x in self.options.as_dict().items() if not described[name].setup_only}
        results = {name: x for name, x in options.items() if not described[name].speed_only}
        self._arguments, self._reference_arguments = {**causal, **options}, {**causal, **results}
        self._projected = frozenset(self.projections(1))

    @classmethod
    def packs_documents(cls) -> bool:
        """Whether ``op`` takes ``segment_ids``."""
        return "segment_ids" in inspect.signature(cls.op).parameters

    def op_kwargs(self) -> dict[str, Any]:
        """Further arguments of ``op`` in this call: facts, parameters, buffers."""
        return {}

    def reference_kwargs(self) -> dict[str, Any]:
        """Further arguments of ``reference_op`` in this call: ``op_kwargs()``, unless computed literally."""
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
        further = {**self._needed(inputs), **self.packing(segment_ids)}
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        v = drop_sources(v, dropout_p)
        if self.context is not None:
            return self.context.attend(self, (q, k, v), **masks, inputs=further)
        return self.apply_op(*self.operands(q, k, v), **masks, **further)

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
        """The next tokens' outputs (B, H, n, e) and the state after them; cost as the mechanism says.

        A source that is dropped is dropped for the tokens after these, too: the state is without it.
        """
        if not self.causal:
            raise ValueError("causal is False; allowed for extend: an attention built with causal=True")
        tensors = self.operands(q, k, drop_sources(v, dropout_p))
        if padding_mask is not None:  # op knows it by other names
            check_heads("v", v)
            check_padding_mask("padding_mask", padding_mask, v)
        masks = {"key_padding_mask": padding_mask, "query_padding_mask": padding_mask}
        further = {**self._needed(inputs), **self.packing(segment_ids)}
        return self.apply_op(*tensors, **masks, **further, initial_state=state, return_state=True)

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
        """The matrix (B, H, n, m) of which matrix @ v is ``forward``; ``record_attention(model, maps=True)`` keeps it.

        Without attention dropout. Costs m / e calls of ``forward`` and O(n m) memory: for short inputs.
        """
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        further = {**self._needed(inputs), **self.packing(segment_ids)}
        return read_attention_matrix(lambda values: self.linear_op(*self.operands(q, k, values), **masks, **further), v)

    def linear_op(self, *tensors: Tensor | None, **arguments: Any) -> Tensor:
        """The part of ``apply_op`` that is linear in the values: all of it, unless a subclass says otherwise."""
        return self.apply_op(*tensors, **arguments)

    def apply_op(self, *tensors: Tensor | None, **arguments: Any) -> Any:
        """``op`` of the tensors that it takes, with all of its arguments."""
        return type(self).op(*tensors, **arguments, **self._arguments, **self.op_kwargs())

    def apply_reference(self, *tensors: Tensor | None, **arguments: Any) -> Tensor:
        """``reference_op`` of the same."""
        return type(self).reference_op(*tensors, **arguments, **self._reference_arguments, **self.reference_kwargs())

    def operands(self, q: Tensor | None, k: Tensor | None, v: Tensor) -> tuple[Tensor | None, ...]:
        """The tensors that ``op`` takes; ValueError for one that is projected and not given, or the reverse."""
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
        """``segment_ids`` as an argument of ``op``, where given; ValueError where ``op`` has none."""
        if segment_ids is None:
            return {}
        if self.context is not None:
            raise ValueError("segment_ids is given; allowed where several processes hold one sequence: None")
        if not self.packs_documents():
            raise ValueError(f"segment_ids is given; allowed for attention {self.name!r}: None, no packed documents")
        return {"segment_ids": segment_ids}

    def _needed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """``inputs``, if they are those that ``needs`` names; ValueError otherwise."""
        inputs = {name: x for name, x in inputs.items() if x is not None}
        wanted = {name for name in INPUTS if name in self.needs}
        if self.causal and "forget" in self.supports and "log_decay" in inputs:
            wanted.add("log_decay")
        if inputs.keys() == wanted:
            return inputs
        name = min(inputs.keys() ^ wanted)
        is_given, allowed = ("is given", "without it") if name in inputs else ("is None", f"{INPUTS.get(name)}")
        raise ValueError(f"{name} {is_given}; allowed for attention {self.name!r}: {allowed}")


def drop_sources(v: Tensor, dropout_p: float) -> Tensor:
    """Attention dropout in linear time: whole sources of v (B, H, m, e) are dropped, the rest scaled by 1/(1-p).

    Dropping entries of the attention map one by one would need the map; this drops the same columns for every query.
    """
    if dropout_p == 0.0:
        return v
    return v * F.dropout(torch.ones_like(v[..., :1]), dropout_p)
