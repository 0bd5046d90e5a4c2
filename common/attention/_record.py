"""Looking into a trained model: what its attentions weigh tokens by, call by call."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class AttentionRecord(NamedTuple):
    """One call of one Flow-Attention module."""

    name: str  # of the module inside the model
    competition: Tensor  # (B, H, m), per source (Figures 4, 8, 9)
    allocation: Tensor  # (B, H, n), per sink (Figures 5, 7)


class KeyRecord(NamedTuple):
    """One call of one DAFT module."""

    name: str  # of the module inside the model
    keys: Tensor  # (B, H, n, c): exp of it weighs each token; c is 1 in DAFT-conv, d / H in DAFT-full


def record_attention(model: nn.Module) -> contextlib.AbstractContextManager[list[AttentionRecord]]:
    """Inside the ``with``, every forward pass of ``model`` appends a record per Flow-Attention module, in call order.

    Works for any model of either host that holds the module, while it generates too: one record per module and step.
    Weights are detached. Costs a second pass over q and k.

    Raises:
        ValueError: ``model`` holds no Flow-Attention; at the end, the modules were never called where that can be seen.
    """
    return _recorded(model, "recorded_weights", "Flow-Attention", lambda name, weights: AttentionRecord(name, *weights))


def record_keys(model: nn.Module) -> contextlib.AbstractContextManager[list[KeyRecord]]:
    """Inside the ``with``, every forward pass of ``model`` appends the keys of each of its DAFT modules, in call order.

    Works for any model of either host that holds the modules, while it generates too. Keys are detached, as large as
    the input, and those of padded tokens are left as they are.

    Raises:
        ValueError: ``model`` holds no DAFT; at the end, as in ``record_attention``.
    """
    return _recorded(model, "recorded_keys", "DAFT", KeyRecord)


@contextlib.contextmanager
def _recorded(
    model: nn.Module, method: str, mechanism: str, record: Callable[[str, Any], NamedTuple]
) -> Iterator[list[Any]]:
    """Collect ``record(name, module.METHOD(inputs))`` at each call of the modules of ``model`` that have the method."""
    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, method)]
    if not modules:
        raise ValueError(f"model is a {type(model).__name__} without {mechanism}; allowed: a model that holds one")
    records: list[Any] = []
    for name, module in modules:
        for entry in ("forward", "extend"):
            setattr(module, entry, _observed(getattr(module, entry), getattr(module, method), name, records, record))
    try:
        yield records
    finally:
        for _, module in modules:
            del module.forward, module.extend
    if not records:
        raise ValueError(
            f"{len(modules)} modules of {mechanism} were not called, or not where that can be seen; allowed inside the "
            "with: at least one forward pass of a model that is neither compiled nor scripted"
        )


def _observed(
    call: Callable, method: Callable, name: str, records: list[Any], record: Callable[[str, Any], NamedTuple]
) -> Callable:
    """``call``, which appends a record first."""
    signature, taken = inspect.signature(call), inspect.signature(method).parameters

    @functools.wraps(call)
    def observed(*args: Any, **kwargs: Any) -> Any:
        # Activation checkpointing calls a module again inside the backward pass; that call was recorded already.
        if torch._C._current_graph_task_id() == -1:
            inputs = signature.bind(*args, **kwargs).arguments  # tensors may come by position or by name
            if "padding_mask" in inputs:
                inputs["key_padding_mask"] = inputs["query_padding_mask"] = inputs["padding_mask"]
            with torch.no_grad():
                records.append(record(name, method(**{key: x for key, x in inputs.items() if key in taken})))
        return call(*args, **kwargs)

    return observed
