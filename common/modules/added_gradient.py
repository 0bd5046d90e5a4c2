"""An auxiliary loss that is added through a model's output, without changes to the trainer."""

from typing import Any

import torch
from torch import Tensor


def add_gradient(x: Tensor, auxiliary_loss: Tensor) -> Tensor:
    """Return ``x`` unchanged; the backward pass continues as if the trainer's loss included ``auxiliary_loss``.

    A trainer that computes loss = f(x) gets the gradients of f(x) + ``auxiliary_loss``, while the value it sees and
    logs is f(x). They are exact when the trainer calls ``backward`` once per update on the loss itself, in one process
    or in several (DistributedDataParallel averages them). A model cannot see the factors that a trainer multiplies its
    loss by: where gradients are accumulated over k batches of losses divided by k, the auxiliary loss counts k times.
    float16 training, whose loss is scaled by large changing factors, is refused.

    Args:
        x: any tensor of the model on the way to the loss.
        auxiliary_loss: a scalar.

    Raises:
        ValueError: ``x`` is float16, or under autocast to it.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    if autocast or x.dtype == torch.float16:
        raise ValueError(
            "the training is in float16, whose loss is scaled by a factor that a model cannot see; allowed with an "
            "auxiliary loss inside the model: bfloat16 or float32"
        )
    return _AddedGradient.apply(x, auxiliary_loss)


class _AddedGradient(torch.autograd.Function):
    """The identity in ``x``, with a gradient of 1 for ``auxiliary_loss``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, auxiliary_loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        (auxiliary_loss,) = ctx.saved_tensors
        return grad_output, torch.ones_like(auxiliary_loss)
