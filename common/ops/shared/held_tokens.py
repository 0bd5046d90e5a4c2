"""The last tokens that a state holds, newest last: all tokens so far, up to the size of a window.

Its entries (B, H, L, ...) grow with the tokens that are read, including padding, so that their size does not depend on
the values of tensors, until L is the window. The first slots of a row with fewer real tokens are empty; the mechanism
counts real tokens and hides these slots.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .padding import take
from .state import State, begins_largest
from .tracing import runs_eagerly


def held_length(state: State | None, name: str, most: int) -> int:
    """L, the number of tokens in ``state[name]``, at most ``most``; for None, that of a new state.

    For an invalid entry it is ``most``, so that ``check_state`` reports what is allowed.

    Raises:
        ValueError: a row had more than L tokens and L is below ``most``: the state of a shorter window.
    """
    entry = state.get(name) if isinstance(state, dict) else None
    if not isinstance(entry, Tensor) or entry.dim() < 3 or entry.shape[2] > most:
        return most if state is not None or begins_largest() else 0
    length, count = entry.shape[2], state.get("count")
    if length == most or not isinstance(count, Tensor) or count.device.type != "cpu" or not runs_eagerly(count):
        return length
    if count.numel() and int(count.max()) > length:
        raise ValueError(
            f"initial_state[{name!r}] holds {length} of {int(count.max())} tokens; allowed: all of them, or the last "
            f"{most}"
        )
    return length


def with_next(held: Tensor, new: Tensor, most: int) -> Tensor:
    """The last tokens, at most ``most``, of ``held`` (B, H, L, ...) followed by one ``new`` token; O(L)."""
    return torch.cat([held[:, :, max(held.shape[2] + 1 - most, 0) :], new], dim=2)


def last_tokens(x: Tensor, real: Tensor, size: int) -> Tensor:
    """The last ``size`` of the first ``real`` (B, 1) tokens of x (B, H, m, c), zeros before if there are fewer."""
    places = real - size + torch.arange(size, device=x.device)  # (B, size): before the first token where negative
    return take(x, places.clamp(min=0)).masked_fill((places < 0)[:, None, :, None], 0.0)


def unless_padding(padding_mask: Tensor | None, before: State, after: State) -> State:
    """The state ``after`` one token, but that ``before`` it in rows where ``padding_mask`` (B, 1) is True."""
    if padding_mask is None:
        return after
    state = {}
    for name, x in after.items():
        old = before[name]
        if old.shape != x.shape:  # it grew by one token
            old = F.pad(old, [*[0] * (2 * (old.dim() - 3)), 1, 0])
        state[name] = torch.where(padding_mask[:, 0].view(-1, *[1] * (x.dim() - 1)), old, x)
    return state
