"""The parts of an attention with a softmax window, each by itself: the window and the linear part."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from common.attention import LolcatsAttention, only_part

#: Names of the parts in the tables.
WHOLE, WINDOW, LINEAR, NOTHING = PARTS = ("whole", "window alone", "linear part alone", "no attention")


@contextlib.contextmanager
def attending(model: nn.Module, part: str) -> Iterator[None]:
    """Inside, attentions of ``model`` with a window compute ``part``, one of ``PARTS``; other layers do not change."""
    if part != NOTHING:
        with only_part(model, {WHOLE: "both", WINDOW: "window", LINEAR: "linear"}[part]):
            yield
        return
    attentions = [module for module in model.modules() if isinstance(module, LolcatsAttention)]
    hooks = [module.register_forward_hook(lambda *called: torch.zeros_like(called[-1])) for module in attentions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
