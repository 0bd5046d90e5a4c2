"""Checks of arguments: each raises a ValueError that names the argument, its value and what is allowed."""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...argument_error import ArgumentError

#: The most numbers of a table of parameters, 16 GiB in float32: more than any has.
_MOST_NUMBERS = 2**32


def check_choice(argument: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ArgumentError(f"`{argument}` is {shortened(value)}; {allowed_names(value, allowed, repr)}")


def allowed_names(value: Any, allowed: Iterable[str], show: Callable[[str], str] = str) -> str:
    """The end of a message about ``value``: all allowed names, and the name nearest to it."""
    names = list(allowed)
    near = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    return f"allowed: {', '.join(map(show, names)) or 'none'}" + "".join(f"; nearest: {name!r}" for name in near)


def shortened(value: Any) -> str:
    """``repr(value)`` in at most 100 characters, for values read from a file."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def shape_of(value: Any) -> tuple[int, ...] | str:
    """The shape of a tensor, or the type of another value, for a message."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def check_positive_int(argument: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"`{argument}` is {shortened(value)}; allowed: an integer of at least 1")


def check_table(argument: str, length: int, shape: Sequence[int]) -> None:
    """Raise ValueError if a table of ``shape``, which follows from ``argument``, would fill all memory."""
    numbers = math.prod(shape)
    if numbers > _MOST_NUMBERS:
        raise ArgumentError(
            f"`{argument}` is {length:,}, for a table of {numbers:,} numbers; allowed: a table of at most "
            f"{_MOST_NUMBERS:,}"
        )


def check_floor(floor: float) -> None:
    """Raise ValueError unless ``floor`` is a number above 0."""
    if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not 0.0 < floor < float("inf"):
        raise ArgumentError(f"`floor` is {floor!r}; allowed: a number above 0")


def check_probability(argument: str, value: float) -> None:
    """Raise ValueError unless 0 <= ``value`` < 1."""
    if not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ArgumentError(f"`{argument}` is {shortened(value)}; allowed: at least 0 and below 1")


def check_query_key_value(
    q: Tensor, k: Tensor, v: Tensor, one_length: bool, names: Sequence[str] = ("q", "k", "v")
) -> None:
    """Raise ValueError unless q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) fit together; ``one_length`` needs n = m.

    ``names`` are the user's names for the three.
    """
    for name, tensor in zip(names, (q, k, v)):
        check_heads(name, tensor)
    query, key, value = names
    q_shape, k_shape = q.shape, k.shape
    if q_shape[:2] != k_shape[:2] or q_shape[3] != k_shape[3]:
        raise ValueError(
            f"{key} has shape {tuple(k.shape)} and {query} {tuple(q.shape)}; "
            "allowed: the same batch, heads and channels"
        )
    _check_one_value_per_key(k, v, key, value)
    _check_one_kind(names, (q, k, v))
    if one_length and q_shape[2] != k_shape[2]:
        raise ValueError(
            f"{key} has {k_shape[2]} tokens and {query} {q_shape[2]}; "
            "allowed in causal attention and self-attention: the same number"
        )


def check_of_tokens(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ValueError unless ``x`` is a floating point tensor (B, H, n) for q (B, H, n, d), on its device."""
    if not isinstance(x, Tensor) or x.shape != q.shape[:3]:
        raise ValueError(f"{name} is {shape_of(x)}; allowed for q of {tuple(q.shape)}: a tensor {tuple(q.shape[:3])}")
    if not x.is_floating_point() or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}; allowed: floating point on the device of q, {q.device}")


def check_key_value(k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless k (B, H, m, d) and v (B, H, m, e) fit together."""
    check_heads("k", k)
    check_heads("v", v)
    _check_one_value_per_key(k, v, "k", "v")
    _check_one_kind(("k", "v"), (k, v))


def check_heads(name: str, x: Tensor) -> None:
    """Raise ValueError unless x is a floating point tensor (B, H, n, c) with at least one token and channel."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; allowed: a tensor")
    shape = x.shape
    if len(shape) != 4:
        raise ValueError(f"{name} has shape {tuple(shape)}; allowed: 4 dimensions (B, H, tokens, channels)")
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}; allowed: a floating point dtype")
    if shape[2] == 0 or shape[3] == 0:
        raise ValueError(f"{name} has shape {tuple(shape)}; allowed: at least one token and one channel")


def _check_one_value_per_key(k: Tensor, v: Tensor, key: str, value: str) -> None:
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{value} has shape {tuple(v.shape)} and {key} {tuple(k.shape)}; allowed: the same batch, heads and tokens"
        )


def _check_one_kind(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless all tensors have one dtype and are on one device."""
    dtype, device = tensors[0].dtype, tensors[0].device
    for x in tensors[1:]:
        if x.dtype != dtype:
            actual = _listed([x.dtype for x in tensors])
            raise ValueError(f"{_listed(names)} have dtypes {actual}; allowed: one dtype")
        if x.device != device:
            actual = _listed([x.device for x in tensors])
            raise ValueError(f"{_listed(names)} are on {actual}; allowed: one device")


def _listed(values: Sequence[Any]) -> str:
    """The values as in a sentence: "q, k and v"."""
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"


def check_gate_key_value(q: Tensor | None, k: Tensor, v: Tensor, key_channels: int | None = None) -> None:
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


def check_tokens(x: Tensor, q: Tensor, width: int) -> None:
    """Raise ValueError unless x, the tokens before their projection to q (B, H, n, d), is (B, n, ``width``)."""
    expected = (q.shape[0], q.shape[2], width)
    if not isinstance(x, Tensor) or tuple(x.shape) != expected:
        shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        raise ValueError(f"x has {shape}; allowed: a tensor (batch, tokens, width) = {expected}")
    if not x.is_floating_point() or x.device != q.device:
        raise ValueError(f"x is {x.dtype} on {x.device}; allowed: floating point on the device of q, {q.device}")


def check_spatial_shape(shape: Any, tokens: int) -> None:
    """Raise ValueError unless ``shape`` is the (height, width) of an image with ``tokens`` tokens."""
    if not isinstance(shape, Sequence) or len(shape) != 2 or shape[0] * shape[1] != tokens:
        raise ValueError(f"spatial_shape is {shape}; allowed: (height, width) of {tokens} tokens")


def check_positions(positions: Tensor | None, q: Tensor) -> None:
    """Raise ValueError unless ``positions`` is None or int64 (B, n) for q (B, H, n, d), on its device."""
    if positions is None:
        return
    expected = (q.shape[0], q.shape[2])
    if not isinstance(positions, Tensor) or tuple(positions.shape) != expected or positions.dtype != torch.int64:
        is_tensor = isinstance(positions, Tensor)
        actual = f"{tuple(positions.shape)}, {positions.dtype}" if is_tensor else type(positions).__name__
        raise ValueError(f"positions is {actual}; allowed: a tensor (batch, queries) = {expected}, torch.int64")
    if positions.device != q.device:
        raise ValueError(f"positions is on {positions.device}; allowed: the device of q, {q.device}")


def check_both_masks(key_padding_mask: Tensor | None, query_padding_mask: Tensor | None) -> None:
    """Raise ValueError if only one of the masks is given, since queries may or may not be the tokens of the keys.

    For mechanisms whose result depends on it. Works in TorchScript.
    """
    if key_padding_mask is not None and query_padding_mask is None:
        raise ValueError(
            "query_padding_mask is None and key_padding_mask is given; allowed here: both or none, since what queries "
            "are padding changes the outputs of others (in self-attention the same mask twice; all False for none)"
        )
    if query_padding_mask is not None and key_padding_mask is None:
        raise ValueError(
            "key_padding_mask is None and query_padding_mask is given; allowed here: both or none, since what keys "
            "are padding changes all outputs (in self-attention the same mask twice; all False for none)"
        )


def check_padding_mask(argument: str, mask: Tensor | None, like: Tensor) -> None:
    """Raise ValueError unless ``mask`` is None or bool (B, tokens of ``like``) on its device; True = padding."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        dtype = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{argument} has dtype {dtype}; allowed: torch.bool with True = padding")
    expected = (like.shape[0], like.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(f"{argument} has shape {tuple(mask.shape)}; allowed: (batch, tokens) = {expected}")
    if mask.device != like.device:
        raise ValueError(f"{argument} is on {mask.device}; allowed: the device of the input, {like.device}")


def check_masks(key_padding_mask: Tensor | None, k: Tensor, query_padding_mask: Tensor | None, q: Tensor) -> None:
    """``check_padding_mask`` of the keys k (B, H, m, d) and of the queries q (B, H, n, d)."""
    check_padding_mask("key_padding_mask", key_padding_mask, k)
    check_padding_mask("query_padding_mask", query_padding_mask, q)
