"""What a model's training loss has beside the classification, in timm's train.py.

A model cannot add to the loss that train.py computes from its output, and the scripts run unmodified; so timm's tasks,
which compute it, add what ``auxiliary_loss()`` of our models gives.
"""

import functools
from typing import Any, Callable, Dict

import timm.task
from torch import Tensor

from .daft import DaftConvVisionTransformer


def add_auxiliary_losses() -> None:
    """Make ``forward`` of timm's tasks add our models' auxiliary loss to "loss" while they train.

    Other models change nothing, and doing it again, after a reload, replaces what was done before.
    """
    exported = [value for value in vars(timm.task).values() if isinstance(value, type)]
    for task in [value for value in exported if issubclass(value, timm.task.TrainingTask)]:
        forward = vars(task).get("forward")
        if forward is not None:
            task.forward = _with_auxiliary_loss(getattr(forward, "without_auxiliary_loss", forward))


def _with_auxiliary_loss(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def forward_with_auxiliary_loss(self: Any, *args: Any, **kwargs: Any) -> Dict[str, Tensor]:
        result = forward(self, *args, **kwargs)
        if "auxiliary_loss" in result:  # added by a task this one is built on
            return result
        models = [m for m in self.get_trainable_module().modules() if isinstance(m, DaftConvVisionTransformer)]
        losses = [model.auxiliary_loss() for model in models if model.training]
        losses = [loss for loss in losses if loss is not None]
        if losses:
            auxiliary = sum(losses)
            result = {**result, "loss": result["loss"] + auxiliary, "auxiliary_loss": auxiliary.detach()}
        return result

    forward_with_auxiliary_loss.without_auxiliary_loss = forward
    return forward_with_auxiliary_loss
