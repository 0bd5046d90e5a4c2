"""Multiply-adds, parameters and memory of a model, on one input."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..bench.harness.memory import peak_beyond

Shape = Sequence[int]


class Cost(NamedTuple):
    """Cost of one call of a model: operations, parameters and memory."""

    multiply_adds: int  # of a forward pass
    parameters: int
    training_bytes: int | None = None  # peak of a forward and backward pass, with gradients, without weights
    inference_bytes: int | None = None  # peak of a forward pass, without weights


def cost(model: nn.Module, *inputs: Any, memory: bool = True, **named: Any) -> Cost:
    """Measure the cost of ``model(*inputs, **named)``, which returns a tensor, or tuples and dictionaries of them.

    Operations and inference memory are measured in evaluation mode, training memory in training mode with the sum of
    all outputs in place of a loss. Afterwards the model is in the mode it was in. Without ``memory`` there is only one
    pass, for the operations.

    Raises:
        ValueError: the model returns no tensor.
    """
    training = model.training
    try:
        model.eval()
        with torch.no_grad(), _without_gradients(model):
            products = multiply_adds(lambda: model(*inputs, **named))
            found = Cost(products, sum(parameter.numel() for parameter in model.parameters()))
            if not memory:
                return found
            device = next(model.parameters()).device.type
            inference = peak_beyond(lambda: tensors(model(*inputs, **named))[:0], device)  # outputs count
        model.train()
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def step() -> list[Tensor]:
            outputs = [out for out in tensors(model(*inputs, **named)) if out.requires_grad]
            torch.autograd.grad(sum(out.float().sum() for out in outputs), learned, allow_unused=True)
            return []  # gradients count

        return found._replace(training_bytes=peak_beyond(step, device), inference_bytes=inference)
    finally:
        model.train(training)


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Parameters need no gradients meanwhile: torch's counter fails where a module returns one that does."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def multiply_adds(call: Callable[[], Any]) -> int:
    """The multiplications of matrix products and convolutions that ``call`` runs, each with its addition.

    torch's ``FlopCounterMode``, which counts two operations for each, and ``FURTHER`` products that it does not know.
    Products of single numbers, sums, norms and activations are not counted, as in the papers. It counts what runs: a
    causal attention that computes whole blocks and masks half of them has all of their products.
    """
    with FlopCounterMode(display=False, custom_mapping=FURTHER) as counter:
        call()
    return counter.get_total_flops() // 2


def tensors(outputs: Any) -> list[Tensor]:
    """The tensors of floating-point numbers in what a model returned.

    Raises:
        ValueError: there is none.
    """
    found = [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    if not found:
        raise ValueError(f"the model returns {type(outputs).__name__}; allowed: a tensor, or what holds some")
    return found


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _added_products(total: Shape, a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _matrix_vector(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _lstm_layer(x: Shape, first: Shape, second: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x[:-1]) * (math.prod(first) + math.prod(second))


aten = torch.ops.aten
#: Operations with products for which not every version of torch has a formula -> twice their multiply-adds, by shapes.
FURTHER: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.baddbmm_: _added_products,
    aten.addmm_: _added_products,
    aten.mv: _matrix_vector,
    aten.mkldnn_rnn_layer: _lstm_layer,
}
