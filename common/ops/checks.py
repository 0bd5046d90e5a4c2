"""Argument checks every op and module shares: each raises a ValueError that names the argument."""

from typing import Any, Dict, Optional, Sequence

import torch
from torch import Tensor

State = Dict[str, Tensor]

#: Dtypes of the entries of a state that are no sums.
_ENTRY_DTYPES = {"count": torch.int64, "rotary_count": torch.int64, "padding_mask": torch.bool}


def check_choice(argument: str, given: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``given`` is one of ``allowed``."""
    if given not in allowed:
        raise ValueError(f"{argument} is {given!r}; allowed: {', '.join(repr(name) for name in allowed)}")


def check_positive_int(argument: str, given: Any) -> None:
    """Raise ValueError unless ``given`` is an int of at least 1."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{argument} is {given!r}; allowed: an integer of at least 1")


def check_probability(argument: str, given: float) -> None:
    """Raise ValueError unless 0 <= ``given`` < 1."""
    if not isinstance(given, (int, float)) or not 0.0 <= given < 1.0:
        raise ValueError(f"{argument} is {given!r}; allowed: at least 0 and below 1")


def check_query_key_value(
    q: Tensor, k: Tensor, v: Tensor, one_length: bool, names: Sequence[str] = ("q", "k", "v")
) -> None:
    """Raise ValueError unless q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) fit together; ``one_length`` needs n = m.

    ``names`` are what the caller's user knows them by.
    """
    for name, tensor in zip(names, (q, k, v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; allowed: a tensor")
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: 4 dimensions (B, H, tokens, channels)")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: a floating point dtype")
        if tensor.shape[2] == 0 or tensor.shape[3] == 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: at least one token and one channel")
    query, key, value = names
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{key} has shape {tuple(k.shape)} and {query} {tuple(q.shape)}; "
            "allowed: the same batch, heads and channels"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{value} has shape {tuple(v.shape)} and {key} {tuple(k.shape)}; allowed: the same batch, heads and tokens"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(
            f"{query}, {key} and {value} have dtypes {q.dtype}, {k.dtype} and {v.dtype}; allowed: one dtype"
        )
    if q.device != k.device or q.device != v.device:
        raise ValueError(
            f"{query}, {key} and {value} are on {q.device}, {k.device} and {v.device}; allowed: one device"
        )
    if one_length and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{key} has {k.shape[2]} tokens and {query} {q.shape[2]}; "
            "allowed in causal attention and self-attention: the same number"
        )


def check_gate_key_value(q: Optional[Tensor], k: Tensor, v: Tensor, key_channels: Optional[int] = None) -> None:
    """Raise ValueError unless q (or None) and v are (B, T, d) and k is (B, T, d), or (B, T, ``key_channels``)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None and name == "q":
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; allowed: a tensor")
        if tensor.dim() != 3 or 0 in tensor.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: (B, tokens, channels), none empty")
        if not tensor.is_floating_point() or tensor.dtype != v.dtype or tensor.device != v.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}; allowed: floating point as v, {v.dtype} on {v.device}"
            )
    expected = {"q": v.shape, "k": (*v.shape[:2], v.shape[2] if key_channels is None else key_channels)}
    for name, tensor in (("q", q), ("k", k)):
        if tensor is not None and tuple(tensor.shape) != tuple(expected[name]):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; allowed beside v of {tuple(v.shape)}: {tuple(expected[name])}"
            )


def check_padding_mask(argument: str, mask: Optional[Tensor], like: Tensor) -> None:
    """Raise ValueError unless ``mask`` is None or bool (B, tokens of ``like``) on its device; True = padding."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{argument} has dtype {given}; allowed: torch.bool with True = padding")
    expected = (like.shape[0], like.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(f"{argument} has shape {tuple(mask.shape)}; allowed: (batch, tokens) = {expected}")
    if mask.device != like.device:
        raise ValueError(f"{argument} is on {mask.device}; allowed: the device of the input, {like.device}")


def check_state(state: Optional[State], shapes: Dict[str, Sequence[int]], dtype: torch.dtype, like: Tensor) -> None:
    """Raise ValueError unless ``state`` is None or holds exactly the tensors named in ``shapes``, so shaped.

    They must be on the device of ``like``, sums and tokens of ``dtype``: a state cut to half precision is no sum.
    """
    if state is None:
        return
    if not isinstance(state, dict) or set(state) != set(shapes):
        given = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"initial_state holds {given}; allowed: a returned state, holding {sorted(shapes)}")
    for name, shape in shapes.items():
        tensor, argument = state[name], f"initial_state[{name!r}]"
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{argument} is a {type(tensor).__name__}; allowed: a tensor")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{argument} has shape {tuple(tensor.shape)}; allowed for this input: {tuple(shape)}")
        allowed = _ENTRY_DTYPES.get(name, dtype)
        if tensor.dtype != allowed:
            raise ValueError(f"{argument} has dtype {tensor.dtype}; allowed for this input: {allowed}")
        if tensor.device != like.device:
            raise ValueError(f"{argument} is on {tensor.device}; allowed: the device of the input, {like.device}")


def state_entry(state: State, name: str, dim: int, like: Tensor) -> Tensor:
    """``state[name]``, a count or a mask; ValueError unless it has ``dim`` dimensions and the batch of ``like``."""
    entry = state.get(name) if isinstance(state, dict) else None
    if not isinstance(entry, Tensor):
        given = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"initial_state holds {given}; allowed: a returned state, holding {name!r}")
    if entry.dim() != dim or entry.shape[0] != like.shape[0] or entry.dtype != _ENTRY_DTYPES[name]:
        raise ValueError(
            f"initial_state[{name!r}] is {tuple(entry.shape)}, {entry.dtype}; allowed: {dim} dimensions, "
            f"the first of size {like.shape[0]}, {_ENTRY_DTYPES[name]}"
        )
    return entry
