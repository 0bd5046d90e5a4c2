"""Recording the attention weights of a trained model, call by call."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._base import INPUTS


class AttentionRecord(NamedTuple):
    """One call of one Flow-Attention module."""

    name: str  # the module's name in the model
    competition: Tensor  # (B, H, m), per source (Figures 4, 8, 9)
    allocation: Tensor  # (B, H, n), per sink (Figures 5, 7)


class MapRecord(NamedTuple):
    """One call of any attention module, with its implied map."""

    name: str  # the module's name in the model
    map: Tensor  # (B, H, n, m): weight of each source for each query
    competition: Tensor | None = None  # (B, H, m), Flow-Attention only
    allocation: Tensor | None = None  # (B, H, n), Flow-Attention only

    @property
    def summed(self) -> Tensor:
        """(B, H, m): total weight of each source; *Flowformer*'s Figures 4, 8 and 9 draw it for other attentions."""
        return self.map.sum(2)


class KeyRecord(NamedTuple):
    """One call of one DAFT module."""

    name: str  # the module's name in the model
    keys: Tensor  # (B, H, n, c): tokens are weighted by exp(keys); c is 1 in DAFT-conv, d / H in DAFT-full


_Record = Callable[[str, nn.Module, dict[str, Any]], NamedTuple]


def record_attention(
    model: nn.Module, maps: bool = False
) -> contextlib.AbstractContextManager[list[AttentionRecord] | list[MapRecord]]:
    """Inside the ``with``, every forward pass of ``model`` appends a record per Flow-Attention module, in call order.

    Works for any model of either host with our attention, also during generation: one record per module and step.
    Weights are detached. Costs a second pass over q and k.

    With ``maps`` the records are ``MapRecord``, for all of our attention modules and gated attention units. The map is
    the matrix that values are multiplied by. It includes Flow-Attention's competition and allocation and the
    convolution of values that SOFT and Nyström attention add, and some mechanisms have negative entries. Some maps
    do not give the output by themselves: YOSO's is taken before outputs are normalised to unit vectors; that of an
    ``OutputGateAttention`` before its norm and gate, and in the gated delta rule after the activation of the values;
    DAFT's is exp(w + k) over its sum, before the query's gate, and averaged over the channels of a head if each has its
    own key. The map of a gated attention unit is taken before its gate. No map includes attention dropout. A map of
    n x m costs m / e forward passes of the attention (DAFT-full: m) and O(n m) memory, so it suits short inputs. It
    needs whole sequences, since a decoding state holds sums only.

    Raises:
        ValueError: ``model`` holds no Flow-Attention, or with ``maps`` none of our attention modules; at the end, no
            call of a module could be recorded. Inside, with ``maps``, a module continues a sequence.
    """
    if maps:
        return _recorded(model, "attention_matrix", "attention of lineartime", _map_record)
    return _recorded(
        model,
        "recorded_weights",
        "Flow-Attention",
        lambda name, module, inputs: AttentionRecord(name, *_call(module.recorded_weights, inputs)),
        _without_weights(model),
    )


def record_keys(model: nn.Module) -> contextlib.AbstractContextManager[list[KeyRecord]]:
    """Inside the ``with``, every forward pass of ``model`` appends the keys of each of its DAFT modules, in call order.

    Works for any model of either host with DAFT attention, also during generation. Keys are detached and as large as
    the input. Keys of padded tokens are not masked.

    Raises:
        ValueError: ``model`` holds no DAFT; at the end, as in ``record_attention``.
    """
    return _recorded(
        model,
        "recorded_keys",
        "DAFT",
        lambda name, module, inputs: KeyRecord(name, _call(module.recorded_keys, inputs)),
    )


def _map_record(name: str, module: nn.Module, inputs: dict[str, Any]) -> MapRecord:
    """The record of one call, which must process a whole sequence."""
    if inputs.get("state") is not None:
        raise ValueError(f"maps is True and {name!r} continues a sequence; allowed: whole sequences, or maps=False")
    weights = _call(module.recorded_weights, inputs) if hasattr(module, "recorded_weights") else ()
    return MapRecord(name, _call(module.attention_matrix, inputs), *weights)


#: End of the message for a model without our attention; a host's own layers are not recorded.
_STOCK = (
    ". A host's own attention is not recorded; the mechanism 'softmax' in its place computes the same from the same "
    "weights, and is recorded with maps=True"
)


def _without_weights(model: nn.Module) -> str:
    """End of an error message that lists attentions with maps only; empty if the model has none of our attentions."""
    modules = [module for module in model.modules() if hasattr(module, "attention_matrix")]
    names = sorted({getattr(module, "name", None) or type(module).__name__ for module in modules})
    has = "has" if len(names) == 1 else "have"
    return f"; {', '.join(names)} {has} neither competition nor allocation, but a map: maps=True" if names else ""


@contextlib.contextmanager
def _recorded(model: nn.Module, method: str, mechanism: str, record: _Record, hint: str = "") -> Iterator[list[Any]]:
    """Collect ``record(name, module, inputs)`` at each call of the modules of ``model`` that have ``method``."""
    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, method)]
    if not modules:
        raise ValueError(
            f"model is a {type(model).__name__} without {mechanism}; allowed: a model that holds one{hint or _STOCK}"
        )
    records: list[Any] = []
    observed = [(name, module, entry) for name, module in modules for entry in ("forward", "extend")]
    originals = [vars(module).get(entry) for _, module, entry in observed]  # an enclosing recorder's, or None
    for name, module, entry in observed:
        setattr(module, entry, _observed(getattr(module, entry), functools.partial(record, name, module), records))
    try:
        yield records
    finally:
        for (_, module, entry), original in zip(observed, originals):
            if original is None:
                delattr(module, entry)
            else:
                setattr(module, entry, original)
    if not records:
        raise ValueError(
            f"{len(modules)} modules of {mechanism} were not called, or not where that can be seen; allowed inside the "
            "with: at least one forward pass of a model that is neither compiled nor scripted"
        )


def _observed(call: Callable, record: Callable[[dict[str, Any]], NamedTuple], records: list[Any]) -> Callable:
    """Wrap ``call`` so that it first appends a record."""
    signature = inspect.signature(call)
    keywords = [name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD]

    @functools.wraps(call)
    def observed(*args: Any, **kwargs: Any) -> Any:
        # Activation checkpointing calls a module again inside the backward pass; that call was recorded already.
        if torch._C._current_graph_task_id() == -1:
            inputs = signature.bind(*args, **kwargs).arguments  # tensors may be passed by position or by name
            for name in keywords:
                inputs |= inputs.pop(name, {})
            if "padding_mask" in inputs:
                inputs["key_padding_mask"] = inputs["query_padding_mask"] = inputs["padding_mask"]
            with torch.no_grad():
                records.append(record(inputs))
        return call(*args, **kwargs)

    return observed


def _call(method: Callable, inputs: dict[str, Any]) -> Any:
    """Call ``method`` with those ``inputs`` that it accepts."""
    parameters = inspect.signature(method).parameters
    if inputs.get("segment_ids") is not None and "segment_ids" not in parameters:
        raise ValueError("segment_ids is given; allowed for what is recorded here: one document in each row")
    names = {*parameters, *(INPUTS if any(x.kind is x.VAR_KEYWORD for x in parameters.values()) else ())}
    return method(**{name: x for name, x in inputs.items() if name in names})
