"""Gradients by torch's autograd graph, for functions with a hand-written backward pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def graph_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients of ``inputs``, from those of the outputs of ``function(*inputs)``, which is recomputed.

    A hand-written backward pass has no derivative. It calls this if one is required (``create_graph=True``, which
    enables gradients inside a backward pass), for batches of gradients (``is_grads_batched``), and if a kernel has
    failed. None for inputs that need no gradient, and for inputs on which the outputs do not depend.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since the same tensor may be passed as several inputs, which need separate gradients, not their sum.
        views = [None if x is None else x.view_as(x) for x in inputs]
        outputs = function(*views)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    outputs, grads = zip(*(pair for pair in zip(outputs, grad_outputs) if pair[0].requires_grad))
    needed = [x for x in views if x is not None and x.requires_grad]
    results = iter(torch.autograd.grad(outputs, needed, grads, create_graph=create_graph, allow_unused=True))
    return [next(results) if x is not None and x.requires_grad else None for x in views]
