"""The state of attention that needs every token it has seen: tensors that grow along their token axis."""

import torch
from torch import Tensor

from .state import State, check_state, state_entry

#: What keys and values may be kept in.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def extend_kv_cache(new: dict[str, Tensor], padding_mask: Tensor | None, state: State | None) -> State:
    """``state`` with the tokens of ``new`` after it: each (B, H, n, c); ``padding_mask`` (B, n), True = padding.

    The result holds the names of ``new``, (B, H, m + n, c) for m tokens before, and ``padding_mask`` (B, m + n); O(m).
    A sequence may go on in another floating point dtype than it began in, as it does when autocast is switched on or
    off: the result is in the more precise one of both.

    Raises:
        ValueError: ``state`` does not fit the new tokens.
    """
    first = next(iter(new.values()))
    if padding_mask is None:
        padding_mask = torch.zeros(first.shape[0], first.shape[2], dtype=torch.bool, device=first.device)
    new = {**new, "padding_mask": padding_mask}
    if state is None:
        return new
    seen = state_entry(state, "padding_mask", 2, first).shape[1]
    shapes = {name: (*x.shape[:2], seen, x.shape[3]) for name, x in new.items() if name != "padding_mask"}
    check_state(state, {**shapes, "padding_mask": (first.shape[0], seen)}, _DTYPES, first)
    # torch.cat promotes: half precision beside float32 is float32, float16 beside bfloat16 is float32 too.
    return {name: torch.cat([state[name], new[name]], dim=1 if name == "padding_mask" else 2) for name in new}
