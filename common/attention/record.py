"""Looking into a trained model: what its attentions weigh tokens by, call by call."""

import contextlib
import inspect
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple, Type, Union

import torch
from torch import Tensor, nn

from .daft import DaftAttention
from .flow import FlowAttention


class AttentionRecord(NamedTuple):
    """One call of one Flow-Attention module."""

    name: str  # of the module inside the model
    competition: Tensor  # (B, H, m), per source (Figures 4, 8, 9)
    allocation: Tensor  # (B, H, n), per sink (Figures 5, 7)


class KeyRecord(NamedTuple):
    """One call of one DAFT module."""

    name: str  # of the module inside the model
    keys: Tensor  # (B, H, n, c): exp of it weighs each token; c is 1 in DAFT-conv, d / H in DAFT-full


def record_attention(model: nn.Module) -> contextlib.AbstractContextManager[List[AttentionRecord]]:
    """Inside the ``with``, every forward of ``model`` appends a record per Flow-Attention module, in call order.

    Works for any model that holds the module, in either host; weights are detached. Costs a second pass over q and k.

    Raises:
        ValueError: ``model`` holds no Flow-Attention.
    """

    def weights(name: str, module: FlowAttention, given: Dict[str, Any]) -> AttentionRecord:
        wanted = {key: given[key] for key in inspect.signature(module.weights).parameters if key in given}
        return AttentionRecord(name, *module.weights(**wanted))

    return _recorded(model, FlowAttention, "Flow-Attention", weights)


def record_keys(model: nn.Module) -> contextlib.AbstractContextManager[List[KeyRecord]]:
    """Inside the ``with``, every forward of ``model`` appends the keys of each of its DAFT modules, in call order.

    Works for any model that holds the modules, in either host; keys are detached, as large as the input, and those of
    padded tokens are left as they are. Steps of decoding are not recorded.

    Raises:
        ValueError: ``model`` holds no DAFT.
    """

    def keys(name: str, module: nn.Module, given: Dict[str, Any]) -> KeyRecord:
        return KeyRecord(name, given["k"].clone())

    return _recorded(model, DaftAttention, "DAFT", keys)


@contextlib.contextmanager
def _recorded(
    model: nn.Module,
    kinds: Union[Type[nn.Module], Tuple[Type[nn.Module], ...]],
    mechanism: str,
    record: Callable[[str, nn.Module, Dict[str, Any]], Any],
) -> Iterator[List[Any]]:
    """Collect ``record(name, module, arguments)`` of each forward of the modules of ``kinds`` in ``model``."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    if not modules:
        raise ValueError(f"model is a {type(model).__name__} without {mechanism}; allowed: a model that holds one")
    records: List[Any] = []

    def hook_for(name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            # Tensors and masks may come by position or by name.
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            with torch.no_grad():
                records.append(record(name, module, given))

        return hook

    handles = [module.register_forward_pre_hook(hook_for(name), with_kwargs=True) for name, module in modules]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()
