"""Looking into a trained model: the competition and allocation weights of every Flow-Attention in it."""

import contextlib
import inspect
from typing import Iterator, List, NamedTuple

import torch
from torch import Tensor, nn

from .flow import FlowAttention


class AttentionRecord(NamedTuple):
    """One call of one Flow-Attention module."""

    name: str  # of the module inside the model
    competition: Tensor  # (B, H, m), per source (Figures 4, 8, 9)
    allocation: Tensor  # (B, H, n), per sink (Figures 5, 7)


@contextlib.contextmanager
def record_attention(model: nn.Module) -> Iterator[List[AttentionRecord]]:
    """Inside the ``with``, every forward of ``model`` appends a record per Flow-Attention module, in call order.

    Works for any model that holds the module, in either host; weights are detached. Costs a second pass over q and k.

    Raises:
        ValueError: ``model`` holds no Flow-Attention.
    """
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FlowAttention)]
    if not modules:
        raise ValueError(f"model is a {type(model).__name__} without Flow-Attention; allowed: a model that holds one")
    records: List[AttentionRecord] = []

    def hook_for(name: str):
        def hook(module: FlowAttention, args: tuple, kwargs: dict) -> None:
            # Tensors and masks may come by position or by name.
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            wanted = {key: given[key] for key in inspect.signature(module.weights).parameters if key in given}
            with torch.no_grad():
                records.append(AttentionRecord(name, *module.weights(**wanted)))

        return hook

    handles = [module.register_forward_pre_hook(hook_for(name), with_kwargs=True) for name, module in modules]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()
