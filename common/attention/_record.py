"""Looking into a trained model: what its attentions weigh tokens by, call by call."""

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

    name: str  # of the module inside the model
    competition: Tensor  # (B, H, m), per source (Figures 4, 8, 9)
    allocation: Tensor  # (B, H, n), per sink (Figures 5, 7)


class MapRecord(NamedTuple):
    """One call of any attention module, with its implied map."""

    name: str  # of the module inside the model
    map: Tensor  # (B, H, n, m): what each token gives each source
    competition: Tensor | None = None  # (B, H, m) and
    allocation: Tensor | None = None  # (B, H, n), of Flow-Attention alone

    @property
    def summed(self) -> Tensor:
        """(B, H, m): what a source gets of all tokens, which *Flowformer*'s Figures 4, 8 and 9 draw of others."""
        return self.map.sum(2)


class KeyRecord(NamedTuple):
    """One call of one DAFT module."""

    name: str  # of the module inside the model
    keys: Tensor  # (B, H, n, c): exp of it weighs each token; c is 1 in DAFT-conv, d / H in DAFT-full


_Record = Callable[[str, nn.Module, dict[str, Any]], NamedTuple]


def record_attention(
    model: nn.Module, maps: bool = False
) -> contextlib.AbstractContextManager[list[AttentionRecord] | list[MapRecord]]:
    """Inside the ``with``, every forward pass of ``model`` appends a record per Flow-Attention module, in call order.

    Works for any model of either host whose attention is ours, while it generates too: one record per module and step.
    Weights are detached. Costs a second pass over q and k.

    With ``maps`` the records are ``MapRecord``, of every attention of ours and every gated attention unit: the map is
    the matrix that values are multiplied by. So it has Flow-Attention's competition and allocation in it, the
    convolution of values that SOFT and Nyström attention add, and negative entries where a mechanism has such. Two
    mechanisms are not linear in their values: YOSO's map is that before outputs are made unit vectors, DAFT's is
    exp(w + k) over its sum, before the query's gate, and the mean over the channels of a head where each has a key.
    That of a gated attention unit is before its gate too, and attention dropout is in none. A map of n x m costs m / e
    forward passes of the attention (DAFT-full: m) and O(n m) memory, so it is for short inputs, in whole sequences:
    decoding remembers sums.

    Raises:
        ValueError: ``model`` holds no Flow-Attention, or with ``maps`` no attention of ours; at the end, the modules
            were never called where that can be seen. Inside, with ``maps``, a module continues a sequence.
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

    Works for any model of either host whose attention is DAFT, while it generates too. Keys are detached, as large as
    the input, and those of padded tokens are left as they are.

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
    """The record of one call, which must be of a whole sequence."""
    if inputs.get("state") is not None:
        raise ValueError(f"maps is True and {name!r} continues a sequence; allowed: whole sequences, or maps=False")
    weights = _call(module.recorded_weights, inputs) if hasattr(module, "recorded_weights") else ()
    return MapRecord(name, _call(module.attention_matrix, inputs), *weights)


#: What to say of a model without any attention of ours; a host's own layers keep no record.
_STOCK = (
    ". A host's own attention is not recorded; the mechanism 'softmax' in its place computes the same from the same "
    "weights, and is recorded with maps=True"
)


def _without_weights(model: nn.Module) -> str:
    """End of an error message that names attentions without competition and allocation; empty if there are none."""
    modules = [module for module in model.modules() if hasattr(module, "attention_matrix")]
    names = sorted({getattr(module, "name", None) or type(module).__name__ for module in modules})
    has = "has" if len(names) == 1 else "have"
    return f"; {', '.join(names)} {has} neither competition nor allocation, but a map: maps=True" if names else ""


@contextlib.contextmanager
def _recorded(model: nn.Module, method: str, mechanism: str, record: _Record, hint: str = "") -> Iterator[list[Any]]:
    """Collect ``record(name, module, inputs)`` at each call of the modules of ``model`` that have the method."""
    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, method)]
    if not modules:
        raise ValueError(
            f"model is a {type(model).__name__} without {mechanism}; allowed: a model that holds one{hint or _STOCK}"
        )
    records: list[Any] = []
    observed = [(name, module, entry) for name, module in modules for entry in ("forward", "extend")]
    before = [vars(module).get(entry) for _, module, entry in observed]  # another record's, or none
    for name, module, entry in observed:
        setattr(module, entry, _observed(getattr(module, entry), functools.partial(record, name, module), records))
    try:
        yield records
    finally:
        for (_, module, entry), own in zip(observed, before):
            if own is None:
                delattr(module, entry)
            else:
                setattr(module, entry, own)
    if not records:
        raise ValueError(
            f"{len(modules)} modules of {mechanism} were not called, or not where that can be seen; allowed inside the "
            "with: at least one forward pass of a model that is neither compiled nor scripted"
        )


def _observed(call: Callable, record: Callable[[dict[str, Any]], NamedTuple], records: list[Any]) -> Callable:
    """``call``, which appends a record first."""
    signature = inspect.signature(call)
    further = [name for name, taken in signature.parameters.items() if taken.kind is taken.VAR_KEYWORD]

    @functools.wraps(call)
    def observed(*args: Any, **kwargs: Any) -> Any:
        # Activation checkpointing calls a module again inside the backward pass; that call was recorded already.
        if torch._C._current_graph_task_id() == -1:
            inputs = signature.bind(*args, **kwargs).arguments  # tensors may come by position or by name
            for name in further:
                inputs |= inputs.pop(name, {})
            if "padding_mask" in inputs:
                inputs["key_padding_mask"] = inputs["query_padding_mask"] = inputs["padding_mask"]
            with torch.no_grad():
                records.append(record(inputs))
        return call(*args, **kwargs)

    return observed


def _call(method: Callable, inputs: dict[str, Any]) -> Any:
    """``method`` of those ``inputs`` that it takes."""
    taken = inspect.signature(method).parameters
    if inputs.get("segment_ids") is not None and "segment_ids" not in taken:
        raise ValueError("segment_ids is given; allowed for what is recorded here: one document in each row")
    names = {*taken, *(INPUTS if any(one.kind is one.VAR_KEYWORD for one in taken.values()) else ())}
    return method(**{name: x for name, x in inputs.items() if name in names})
