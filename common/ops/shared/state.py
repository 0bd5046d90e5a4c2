"""States of attention, after some tokens or of a source: dicts of tensors with the batch as their first dimension."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]
_BEGINS_LARGEST: ContextVar[bool] = ContextVar("begins_largest", default=False)

#: Entries of a state whose tokens are in slots, by their position; all others have their newest token last.
_IN_SLOTS = frozenset({"chunk", "block", "global_k", "global_v"})
#: Entries of a state that count or mask tokens; all others are floating point.
_ENTRY_DTYPES = {
    **dict.fromkeys(("count", "rotary_count", "codes", "segment_id"), torch.int64),
    "padding_mask": torch.bool,
}


@contextmanager
def largest_states() -> Iterator[None]:
    """Context manager: new decoding states have their largest size, if there is one, from the first token on.

    They keep it afterwards. This is for uses that need fixed shapes: a graph of a step, a message between processes.
    Other states grow with the tokens.
    """
    token = _BEGINS_LARGEST.set(True)
    try:
        yield
    finally:
        _BEGINS_LARGEST.reset(token)


def begins_largest() -> bool:
    """Whether new states have their largest size."""
    return not torch.compiler.is_compiling() and _BEGINS_LARGEST.get()


def check_continuation(causal: bool, initial_state: State | None, return_state: bool) -> None:
    """Raise ValueError if a state is passed to, or requested from, attention that is not causal."""
    if not causal and (initial_state is not None or return_state):
        raise ValueError("initial_state and return_state are given with causal=False; allowed: only with causal=True")


def check_state(
    state: State | None,
    shapes: dict[str, Sequence[int]],
    dtypes: Sequence[torch.dtype],
    like: Tensor,
    argument: str = "initial_state",
) -> None:
    """Raise ValueError unless ``state`` is None or has exactly the tensors named in ``shapes``, with these shapes.

    They must be on the device of ``like``. Counts and masks have their own dtypes, all others one of ``dtypes``.
    ``argument`` is the caller's name for the state.
    """
    if state is None:
        return
    if not isinstance(state, dict) or set(state) != set(shapes):
        raise ValueError(f"{argument} holds {_content(state)}; allowed: a returned state, holding {sorted(shapes)}")
    device = like.device
    for name, shape in shapes.items():
        tensor = state[name]
        allowed = (_ENTRY_DTYPES[name],) if name in _ENTRY_DTYPES else dtypes
        if not isinstance(tensor, Tensor):
            problem = f"is a {type(tensor).__name__}; allowed: a tensor"
        elif tensor.shape != shape and tuple(tensor.shape) != tuple(shape):
            problem = f"has shape {tuple(tensor.shape)}; allowed for this input: {tuple(shape)}"
        elif tensor.dtype not in allowed:
            problem = f"has dtype {tensor.dtype}; allowed for this input: {', '.join(map(str, allowed))}"
        elif tensor.device != device:
            problem = f"is on {tensor.device}; allowed: the device of the input, {device}"
        else:
            continue
        raise ValueError(f"{argument}[{name!r}] {problem}")


def state_of_sums(
    state: State | None,
    shapes: dict[str, Sequence[int]],
    dtype: torch.dtype,
    like: Tensor,
    argument: str = "initial_state",
) -> State | None:
    """``state``, checked against ``shapes`` and with its sums in ``dtype``, which is float32 or float64; None for None.

    So a sequence may continue in another dtype. A state in half precision is refused, because its sums are rounded.

    Raises:
        ValueError: ``state`` does not fit; see ``check_state``.
    """
    check_state(state, shapes, (torch.float32, torch.float64), like, argument)
    if state is None:
        return None
    return {name: x if name in _ENTRY_DTYPES or x.dtype == dtype else x.to(dtype) for name, x in state.items()}


def state_of_source(state: State, vectors: Sequence[str], q: Tensor) -> State:
    """``state`` of a source, checked and in q's dtype, for features q (B, H, n, f) of queries, float32 or float64.

    It has the entries ``vectors``, (B, H, f) each, and ``sum_kv`` (B, H, f, e).

    Raises:
        ValueError: ``state`` does not fit; see ``check_state``.
    """
    if state is None:
        raise ValueError("state is None; allowed: what source_state returned")
    values = state.get("sum_kv") if isinstance(state, dict) else None
    # Any e is allowed: no other argument determines it.
    channels = values.shape[-1:] if isinstance(values, Tensor) else ()
    vector = (*q.shape[:2], q.shape[3])
    return state_of_sums(state, {**dict.fromkeys(vectors, vector), "sum_kv": (*vector, *channels)}, q.dtype, q, "state")


def zero_state(shapes: dict[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> State:
    """A state of zeros, with sums in ``dtype``: the initial state, except for entries that do not start at 0."""
    return {
        name: torch.zeros(shape, dtype=_ENTRY_DTYPES.get(name, dtype), device=device) for name, shape in shapes.items()
    }


def split_state(state: State | None, names: Collection[str]) -> tuple[State | None, State | None]:
    """The entries ``names`` of ``state``, and all others, which belong to another module; None for None.

    Raises:
        ValueError: an entry is missing.
    """
    if state is None:
        return None, None
    if not isinstance(state, dict) or not set(names) <= set(state):
        raise ValueError(f"initial_state holds {_content(state)}; allowed: a returned state, holding {sorted(names)}")
    return {name: state[name] for name in names}, {name: x for name, x in state.items() if name not in names}


def state_entry(state: State, name: str, dim: int, like: Tensor) -> Tensor:
    """``state[name]``, a count or a mask; ValueError unless it has ``dim`` dimensions and fits ``like``."""
    if not isinstance(state, dict) or name not in state:
        raise ValueError(f"initial_state holds {_content(state)}; allowed: a returned state, holding {name!r}")
    entry, dtype = state[name], _ENTRY_DTYPES[name]
    is_tensor = isinstance(entry, Tensor)
    if not is_tensor or entry.dim() != dim or entry.shape[0] != like.shape[0] or entry.dtype != dtype:
        found = f"{tuple(entry.shape)}, {entry.dtype}" if is_tensor else f"a {type(entry).__name__}"
        raise ValueError(
            f"initial_state[{name!r}] is {found}; allowed: a tensor of {dim} dimensions, the first of size "
            f"{like.shape[0]}, {dtype}"
        )
    if entry.device != like.device:
        raise ValueError(
            f"initial_state[{name!r}] is on {entry.device}; allowed: the device of the input, {like.device}"
        )
    return entry


def joined_entries(name: str, entries: Sequence[Tensor]) -> Tensor:
    """The entry ``name`` of several states, concatenated along the batch.

    States may hold different numbers of tokens. If the newest token is last, shorter entries get padding before their
    tokens; if tokens are in slots, shorter entries get empty slots after them.
    """
    if len({x.shape[1:] for x in entries}) > 1:
        dim = 1 if name == "padding_mask" else 2
        longest, after = max(x.shape[dim] for x in entries), [0, 0] * (entries[0].dim() - dim - 1)
        missing = [longest - x.shape[dim] for x in entries]
        sides = ((0, m) if name in _IN_SLOTS else (m, 0) for m in missing)
        entries = [F.pad(x, [*after, *side], value=name == "padding_mask") for x, side in zip(entries, sides)]
    return torch.cat(list(entries))


def _content(state: object) -> object:
    """Names of the entries of ``state``, or its type if it is no dictionary, for messages."""
    return sorted(state) if isinstance(state, dict) else type(state).__name__
