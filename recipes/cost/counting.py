"""Multiply-adds, parameters and memory of a model, on one input."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common.ops.shared.cpu.operators import FORMULAS

from ..bench.harness.memory import peak_beyond

Shape = Sequence[int]


class Cost(NamedTuple):
    """Cost of one call of a model."""

    multiply_adds: int  # of a forward pass
    parameters: int
    training_bytes: int | None = None  # peak of a forward and backward pass, with gradients, without weights
    inference_bytes: int | None = None  # peak of a forward pass, without weights


def cost(model: nn.Module, *inputs: Any, memory: bool = True, **named: Any) -> Cost:
    """Measure the cost of ``model(*inputs, **named)``, which returns a tensor, or tuples and dictionaries of tensors.

    Operations and inference memory are measured in evaluation mode, training memory in training mode, with the sum of
    all outputs as the loss. Afterwards the model's mode is restored. Without ``memory`` only the operations are
    counted, in one forward pass.

    Raises:
        ValueError: the model returns no tensor.
    """
    training = model.training
    try:
        model.eval()
        with torch.no_grad(), _without_gradients(model):
            operations = multiply_adds(lambda: model(*inputs, **named))
            result = Cost(operations, sum(parameter.numel() for parameter in model.parameters()))
            if not memory:
                return result
            device = next(model.parameters()).device.type
            inference = peak_beyond(lambda: tensors(model(*inputs, **named))[:0], device)  # the outputs count as memory
        model.train()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def step() -> list[Tensor]:
            outputs = [output for output in tensors(model(*inputs, **named)) if output.requires_grad]
            torch.autograd.grad(sum(output.float().sum() for output in outputs), trainable, allow_unused=True)
            return []  # the gradients count as memory

        return result._replace(training_bytes=peak_beyond(step, device), inference_bytes=inference)
    finally:
        model.train(training)


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Turn off gradients of parameters: torch's counter fails if a module returns a parameter that requires one."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def multiply_adds(call: Callable[[], Any]) -> int:
    """Count the multiply-adds of the matrix products and convolutions that ``call`` runs.

    Uses torch's ``FlopCounterMode``, which counts two operations per multiply-add, with formulas for the operations in
    ``FURTHER``. Elementwise products, sums, norms and activations are not counted, as in the papers. All computed
    products count: a causal attention that computes whole blocks and masks half of them counts whole blocks.
    """
    with FlopCounterMode(display=False, custom_mapping=FURTHER) as counter:
        call()
    return counter.get_total_flops() // 2


def tensors(outputs: Any) -> list[Tensor]:
    """The floating-point tensors in a model's outputs.

    Raises:
        ValueError: there are none.
    """
    leaves = [
        leaf
        for leaf in torch.utils._pytree.tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    if not leaves:
        raise ValueError(f"the model returns {type(outputs).__name__}; allowed: a tensor, or what holds some")
    return leaves


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _added_products(total: Shape, a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _matrix_vector(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _lstm_layer(x: Shape, first: Shape, second: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x[:-1]) * (math.prod(first) + math.prod(second))


aten = torch.ops.aten
#: Operations without a formula in some versions of torch -> a function from shapes to twice their multiply-adds.
FURTHER: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.baddbmm_: _added_products,
    aten.addmm_: _added_products,
    aten.mv: _matrix_vector,
    aten.mkldnn_rnn_layer: _lstm_layer,
    **FORMULAS,
}
