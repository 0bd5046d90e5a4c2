"""Causal attention of short inputs, where calls take more time than arithmetic: mechanisms with kernels, and softmax.

Functions alone, without the projections of a layer. Gates are made from normal numbers, and that is timed too.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from common.ops import flow_attention, gated_delta_attention, linear_attention
from common.ops.flow.reference import flow_attention_reference
from common.ops.gated_delta.reference import gated_delta_attention_reference
from common.ops.linear.reference import linear_attention_reference

from ..harness.operations import Check, Function, Operation
from .operations import BATCH, HEAD_DIM, HEADS, softmax_function

LINEAR, BY_HEAD, BY_CHANNEL = "linear", "linear, gates by head", "linear, gates by channel"
DELTA, FLOW = "gated delta rule", "flow"
#: Each with the time that it may take at 128 and at 256 tokens, forward and backward, over fused softmax attention's.
LIMITS = {**dict.fromkeys((LINEAR, BY_HEAD, BY_CHANNEL, DELTA), {128: 1.0, 256: 0.5}), FLOW: {128: 1.1, 256: 0.6}}
LENGTHS, _QUICK = (64, 128, 256, 512), (128,)
#: Tokens of comparisons with the literal references; no chunk size divides it.
_LITERAL = 37


def _linear(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return function(q, k, v, causal=True)


def _by_head(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, head: Tensor, *_: Tensor) -> Tensor:
    return function(q, k, v, causal=True, log_decay=-head.abs())


def _by_channel(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, head: Tensor, channel: Tensor
) -> Tensor:
    return function(q, k, v, causal=True, log_decay=-channel.abs())


def _delta(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, head: Tensor, *_: Tensor) -> Tensor:
    return function(q, k, v, causal=True, beta=head.sigmoid(), log_decay=-head.abs())


def _functions() -> tuple[Function, ...]:
    linear = linear_attention, linear_attention_reference
    pairs = {
        LINEAR: (_linear, *linear),
        BY_HEAD: (_by_head, *linear),
        BY_CHANNEL: (_by_channel, *linear),
        DELTA: (_delta, gated_delta_attention, gated_delta_attention_reference),
        FLOW: (_linear, flow_attention, flow_attention_reference),
    }
    ours = (
        Function(name, partial(call, function), (Check(partial(call, reference), _LITERAL, heads=1),))
        for name, (call, function, reference) in pairs.items()
    )
    return (*ours, softmax_function(causal=True))


def _shapes(batch: int, tokens: int) -> list[tuple[int, ...]]:
    """The shapes of q, k, v, and of the numbers that gates are made of."""
    vectors = (batch, HEADS, tokens, HEAD_DIM)
    return [vectors, vectors, vectors, vectors[:3], vectors]


OPERATIONS = tuple(
    Operation(
        name,
        title,
        ("q", "k", "v", "head gates", "channel gates"),
        partial(_shapes, batch),
        _functions(),
        LENGTHS,
        _QUICK,
        f"B = {batch}, H = {HEADS}, d = {HEAD_DIM}; default options",
        plotted=False,
    )
    for name, title, batch in (
        ("short_inputs", "Causal attention of short inputs", 1),
        ("short_inputs_batch", f"Causal attention of short inputs, {BATCH} sequences", BATCH),
    )
)
CASES = tuple(operation.case() for operation in OPERATIONS)
