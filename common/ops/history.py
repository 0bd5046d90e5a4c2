"""The state of attention that needs every token it has seen: tensors that grow along their token axis."""

from typing import Dict, Optional

import torch
from torch import Tensor

from .checks import State, check_state, state_entry


def extend_history(new: Dict[str, Tensor], padding_mask: Optional[Tensor], state: Optional[State]) -> State:
    """``state`` and, behind it, the tokens of ``new``: each (B, H, n, c), and ``padding_mask`` (B, n), True = padding.

    The result holds the names of ``new``, (B, H, m + n, c) for m tokens before, and ``padding_mask`` (B, m + n); O(m).

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
    check_state(state, {**shapes, "padding_mask": (first.shape[0], seen)}, first.dtype, first)
    return {name: torch.cat([state[name], new[name]], dim=1 if name == "padding_mask" else 2) for name in new}
