"""Flow-Attention of all sinks with all sources by kernels for CPUs, as an operator of PyTorch."""

from typing import Any

from torch import Tensor

from ...shared.cpu import threads
from ...shared.cpu.operators import kernel_operator
from ...shared.cpu.tensors import contiguous_channels, empty_like, rows
from ...shared.precision import autocast_off
from ..full import flow_attention_in_graph
from ..options import FlowOptions
from . import whole_fours
from .arguments import SCHEMA, addresses, constants_of, kernel_options, options_of, real_tokens

#: Multiply-adds that take as long as what a kernel does with a token beside its product with a matrix.
_OF_A_TOKEN = 700


def full_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
    options: FlowOptions,
) -> Tensor:
    """``flow_attention_in_graph``, but in O(n) memory in addition to inputs, output and gradients.

    Kept for a backward pass: inputs, output, five numbers for each token and head, and sums of each head. Meanwhile,
    each thread has the features of one head.
    """
    rescale = options.form.rescale
    return _operator(q, k, v, key_padding_mask, query_padding_mask, *constants_of(options), rescale)[0]


def _allocate(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    (batch, heads, n, d), m, e = q.shape, k.shape[2], v.shape[3]
    # In the memory order of q if possible, so that a host joins heads without a copy.
    out = empty_like(q) if d == e else q.new_empty(batch, heads, n, e)
    of_sinks, of_sources = q.new_empty(batch, heads, 2, whole_fours(n)), q.new_empty(batch, heads, 3, whole_fours(m))
    return out, of_sinks, of_sources, q.new_empty(batch, heads, 4, d), q.new_empty(batch, heads, d, e)


def _forward(inputs: tuple, constants: tuple, outputs: tuple) -> None:
    from . import full_kernels as kernels

    call = _Call(inputs, constants)
    out, *kept = outputs
    work = kernels.forward_work(*call.sizes[1:])
    threads.run(kernels.forward, call.units, call.operations, work, out, *call.arguments, rows(out), addresses(kept))


def _backward(inputs: tuple, constants: tuple, saved: list, grads: list, grad_inputs: list) -> None:
    from . import full_backward_kernels as kernels

    call = _Call(inputs, constants)
    # A hook of saved tensors may have given them another layout.
    out, grad_out, kept = (
        contiguous_channels(saved[0]),
        contiguous_channels(grads[0]),
        [x.contiguous() for x in saved[1:]],
    )
    # The kernel writes all gradients, also those that are not wanted.
    targets = [empty_like(x) if grad is None else grad for x, grad in zip(inputs[:3], grad_inputs)]
    results = rows(out), addresses(kept), rows(grad_out)
    work = kernels.backward_work(*call.sizes[1:], call.group)
    arguments = *call.arguments, results, tuple(map(rows, targets))
    threads.run(kernels.backward, call.units, 2 * call.operations, work, out, *arguments)


class _Call:
    """The arguments that both passes give to their kernels; it keeps the tensors whose addresses it gives."""

    def __init__(self, inputs: tuple, constants: tuple) -> None:
        q, k, v = tensors = [contiguous_channels(x) for x in inputs[:3]]
        key_padding, query_padding = inputs[3:5]
        sources = real_tokens(key_padding)
        sinks = sources if query_padding is key_padding else real_tokens(query_padding)
        self._kept = tensors, sinks, sources
        (batch, heads, n, d), m, e = q.shape, k.shape[2], v.shape[3]
        self.sizes, options = (heads, n, m, d, e), kernel_options(tuple(constants), q.dtype)
        self.group = heads if options_of(constants[:6]).competition == "softmax_heads" else 1
        self.units = batch * heads // self.group
        self.operations = batch * heads * (n + m) * (d * e // 2 + _OF_A_TOKEN)
        tokens = (*addresses(sinks), 0), (*addresses(sources), 0)
        self.arguments = self.sizes, options, self.group, tokens, tuple(map(rows, tensors))


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, query_padding: Tensor | None, *constants: Any
) -> tuple[Tensor]:
    """The operator's result in PyTorch's differentiable functions."""
    with autocast_off(q):
        options = options_of(constants[:6], constants[6])
        return (flow_attention_in_graph(q, k, v, key_padding, query_padding, options),)


_operator = kernel_operator(
    "full_flow",
    ("q", "k", "v", "key_padding?", "query_padding?"),
    f"{SCHEMA}, bool rescale",
    (1, 4),
    lambda *_: range(5),
    _allocate,
    _forward,
    _backward,
    _plain,
    multiply_adds=(2, 4),
)
