"""Kernels as opaque operators for torch.compile.

An operator of a mechanism runs the same code as eager PyTorch: kernels, compared before their first use, or plain
PyTorch if they fail; or blocks on a CPU, if compiling their graph would take minutes (``chunked_sums``). Its gradients
are a second operator, which recomputes the output: only inputs are kept.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..autograd import graph_gradients
from ..tracing import runs_eagerly

LIBRARY = "lineartime"


def differentiable_operator(
    name: str,
    tensors: Sequence[str],
    constants: str,
    outputs: int,
    run: Callable[..., Sequence[Tensor]],
    fake: Callable,
) -> Callable[..., Any]:
    """The operator lineartime::NAME with gradients of first order.

    Args:
        tensors: names of the tensors among its arguments, which come first; one with a "?" may be None.
        constants: the others, in PyTorch's language of schemas.
        outputs: their number; a single one is a tensor, several are a tuple. No output may be an input.
        run: (tensors, constants) -> a tuple of outputs, all floating-point.
        fake: the same for tensors without numbers, contiguous.
    """
    arguments = ", ".join(f"Tensor? {x[:-1]}" if x.endswith("?") else f"Tensor {x}" for x in tensors)
    size = len(tensors)

    def of_schema(results: Sequence[Tensor]) -> Any:
        return tuple(results) if outputs > 1 else results[0]

    def forward(*values: Any) -> Any:
        with torch.no_grad():
            return of_schema(run(*values))

    def backward(*values: Any) -> list[Tensor]:
        inputs, (grads, needed, *constants) = values[:size], values[size:]
        results = _gradients_apart(lambda *x: tuple(run(*x, *constants)), inputs, grads, needed)
        # In the layout that the operator declares, whatever the layout of the inputs.
        zeros = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(_of(inputs, needed), results))
        return [grad.clone(memory_format=torch.contiguous_format) for grad in zeros]

    options = {"mutates_args": ()}
    schema = f"({arguments}, {constants}) -> ({', '.join(['Tensor'] * outputs)})"
    operator = torch.library.custom_op(f"{LIBRARY}::{name}", forward, schema=schema, **options)
    operator.register_fake(lambda *values: of_schema(fake(*values)))
    schema = f"({arguments}, Tensor[] grads, bool[] needed, {constants}) -> Tensor[]"
    gradient = torch.library.custom_op(f"{LIBRARY}::{name}_backward", backward, schema=schema, **options)
    gradient.register_fake(lambda *values: [x.new_empty(x.shape) for x in _of(values[:size], values[size + 1])])

    def keep(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:size])
        ctx.constants = inputs[size:]

    def differentiate(ctx: Any, *grads: Tensor) -> tuple:
        inputs, needed = ctx.saved_tensors, [bool(x) for x in ctx.needs_input_grad[:size]]
        if torch.is_grad_enabled() and runs_eagerly(*grads):  # in a graph that is compiled and not traced by autograd
            results = graph_gradients(lambda *x: tuple(run(*x, *ctx.constants)), inputs, grads)
            return (*results, *[None] * len(ctx.constants))
        grads_needed = iter(gradient(*inputs, list(grads), needed, *ctx.constants))
        return (*(next(grads_needed) if need else None for need in needed), *[None] * len(ctx.constants))

    operator.register_autograd(differentiate, setup_context=keep)
    return operator


def _of(inputs: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor]:
    return [x for x, need in zip(inputs, needed) if need]


def _gradients_apart(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The ``needed`` gradients, computed in a thread, because torch records no graph inside an operator."""
    device = grads[0].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def compute() -> list[Tensor | None]:
        leaves = [x if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needed)]
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream), torch.no_grad():
            return graph_gradients(function, leaves, grads)

    with ThreadPoolExecutor(1) as pool:
        grads_of_all = pool.submit(compute).result()
    return [grad for grad, need in zip(grads_of_all, needed) if need]
