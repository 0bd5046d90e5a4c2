"""Parts of an attention with a softmax window, each by itself, to see what the window and the linear part do."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from common.attention import LolcatsAttention, only_part

#: By the words of the tables.
WHOLE, WINDOW, LINEAR, NOTHING = PARTS = ("whole", "window alone", "linear part alone", "no attention")


@contextlib.contextmanager
def attending(model: nn.Module, part: str) -> Iterator[None]:
    """Inside, the attentions of ``model`` that have a window are one of ``PARTS``; other layers stay as they are."""
    if part != NOTHING:
        with only_part(model, {WHOLE: "both", WINDOW: "window", LINEAR: "linear"}[part]):
            yield
        return
    ours = [module for module in model.modules() if isinstance(module, LolcatsAttention)]
    hooks = [module.register_forward_hook(lambda *called: torch.zeros_like(called[-1])) for module in ours]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
