"""Operators of PyTorch whose forward and backward pass are kernels, called eagerly and by torch.compile."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autograd import graph_gradients
from ..precision import autocast_off
from ..tracing import runs_eagerly
from .tensors import empty_like

LIBRARY = "lineartime"
#: Operator -> twice its multiply-adds, from the shapes of its arguments. It is for ``FlopCounterMode``'s
#: ``custom_mapping``, which cannot look into a kernel, and not registered with torch, whose counter imports Triton.
FORMULAS: dict[Any, Callable[..., int]] = {}


def kernel_operator(
    name: str,
    inputs: Sequence[str],
    constants: str,
    outputs: tuple[int, int],
    reads: Callable[..., Sequence[int]],
    allocate: Callable[..., tuple[Tensor, ...]],
    forward: Callable[..., None],
    backward: Callable[..., None],
    plain: Callable[..., tuple[Tensor, ...]],
    multiply_adds: tuple[int, int],
) -> Callable[..., tuple[Tensor, ...]]:
    """The operator lineartime::NAME and its gradients.

    Args:
        inputs: names of the tensors among its arguments, which come first; one with a "?" may be None.
        constants: the others, in PyTorch's language of schemas.
        outputs: the number of results, which have gradients, and of further outputs, for the backward pass alone.
        reads: (*constants) -> which outputs the backward pass reads. A caller may change the others in place, and
            their memory is not kept.
        allocate: (*inputs, *constants) -> all outputs, without values. One that is not there has no numbers.
        forward: (inputs, constants, outputs): writes the outputs.
        backward: (inputs, constants, saved, grads, grad_inputs): writes the gradients of inputs from those of
            results; ``saved`` are the outputs that it reads. A gradient is None for a result that has none, and for an
            input that needs none.
        plain: (*inputs, *constants) -> the results by differentiable functions, for gradients of gradients.
        multiply_adds: of the forward and the backward pass, for each token and entry of its sums, without what is
            computed again; for ``FORMULAS``.
    """
    size, (results, further) = len(inputs), outputs

    def run(*values: Any) -> tuple[Tensor, ...]:
        _refuse_tangents(name, values[:size])
        allocated = allocate(*values)
        forward(values[:size], values[size:], allocated)
        return allocated

    def run_backward(*values: Any) -> list[Tensor]:
        allocated = allocate_grads(*values)
        grad_inputs, (saved, grads, needed, *rest) = iter(allocated), values[size:]
        backward(values[:size], rest, saved, grads, [next(grad_inputs) if need else None for need in needed])
        return allocated

    def allocate_grads(*values: Any) -> list[Tensor]:
        return [empty_like(x) for x, need in zip(values, values[size + 2]) if need]

    arguments = ", ".join(f"Tensor? {x[:-1]}" if x.endswith("?") else f"Tensor {x}" for x in inputs)
    options = {"mutates_args": (), "device_types": "cpu"}
    constants = f", {constants}" if constants else ""
    schema = f"({arguments}{constants}) -> ({', '.join(['Tensor'] * (results + further))})"
    operator = torch.library.custom_op(f"{LIBRARY}::{name}", run, schema=schema, **options)
    operator.register_fake(allocate)
    schema = f"({arguments}, Tensor[] saved, Tensor?[] grads, bool[] needed{constants}) -> Tensor[]"
    gradient = torch.library.custom_op(f"{LIBRARY}::{name}_backward", run_backward, schema=schema, **options)
    gradient.register_fake(allocate_grads)

    def keep(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:size], *(output[i] for i in reads(*inputs[size:])))
        ctx.set_materialize_grads(False)
        ctx.constants = inputs[size:]

    def differentiate(ctx: Any, *grads: Tensor | None, by: Callable[..., list[Tensor]] = gradient) -> tuple:
        saved = ctx.saved_tensors  # read once, as activation checkpointing allows
        tensors, grads, rest = saved[:size], grads[:results], ctx.constants
        if all(x is None for x in grads):
            return (None,) * (size + len(rest))
        if _needs_graph([x for x in grads if x is not None]):
            given = [(i, x) for i, x in enumerate(grads) if x is not None]
            chosen = lambda *x: tuple(plain(*x, *rest)[i] for i, _ in given)  # noqa: E731
            with autocast_off(tensors[0]):
                return (*graph_gradients(chosen, tensors, [x for _, x in given]), *[None] * len(rest))
        needed = [bool(x) for x in ctx.needs_input_grad[:size]]
        grad_inputs = iter(by(*tensors, list(saved[size:]), list(grads), needed, *rest))
        return (*(next(grad_inputs) if need else None for need in needed), *[None] * len(rest))

    operator.register_autograd(differentiate, setup_context=keep)
    for suffix, count in zip(("", "_backward"), multiply_adds):
        FORMULAS[getattr(getattr(torch.ops, LIBRARY), name + suffix)] = partial(_operations, 2 * count)

    class Eager(torch.autograd.Function):
        """The operator without the dispatcher, which takes 0.1 ms for both passes."""

        @staticmethod
        def forward(ctx: Any, *values: Any) -> tuple[Tensor, ...]:
            output = run(*values)
            keep(ctx, values, output)
            ctx.mark_non_differentiable(*output[results:])
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple:
            return differentiate(ctx, *grads, by=gradient if _is_seen() else run_backward)

    def call(*values: Any) -> tuple[Tensor, ...]:
        if _is_seen():
            return operator(*values)
        needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in values[:size])
        return Eager.apply(*values) if needs_gradient else run(*values)

    return call


def _is_seen() -> bool:
    """Whether something sees operators alone: torch.compile, and modes of dispatch, such as those of tracing."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _operations(factor: int, q: torch.Size, k: torch.Size, v: torch.Size | None, *_: Any, **__: Any) -> int:
    """``factor`` times the entries of the sums of all tokens, for the shapes of the first inputs.

    They are d e for each query q (B, H, n, d), and for each key k (B, H, m, d) and value v (B, H, m, e), half of them
    each; and c for one of x (B, H, n, c), given as q, and its gates, given as k, which have no values.
    """
    columns = v[3] if v is not None and len(v) == 4 else 1
    return factor * math.prod(q[:2]) * (q[2] + k[2]) * q[3] * columns // 2


def _refuse_tangents(name: str, tensors: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError in forward mode, in which PyTorch would take the tangents of an operator as 0."""
    if torch.autograd.forward_ad._current_level >= 0:
        if any(x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise RuntimeError(f"{LIBRARY}::{name} has no forward-mode derivative; call the attention function instead")


def _needs_graph(grads: Sequence[Tensor]) -> bool:
    """Whether gradients must be computed by a graph: for gradients of them, and batches of them, not while tracing."""
    if torch.compiler.is_compiling():
        return False
    if any(torch._C._functorch.is_legacy_batchedtensor(x) for x in grads):
        return True
    return torch.is_grad_enabled() and runs_eagerly(*grads)
