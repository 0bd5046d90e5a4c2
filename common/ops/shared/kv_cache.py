"""The state of attention that needs all earlier tokens: tensors that grow along their token axis."""

import torch
from torch import Tensor

from .state import State, check_state, state_entry

#: Allowed dtypes of cached keys and values.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def extend_kv_cache(new: dict[str, Tensor], padding_mask: Tensor | None, state: State | None) -> State:
    """``state`` with the tokens of ``new`` after it: each (B, H, n, c); ``padding_mask`` (B, n), True = padding.

    The result holds the names of ``new``, (B, H, m + n, c) for m tokens before, and ``padding_mask`` (B, m + n); O(m).
    A sequence may continue in another floating point dtype, for example when autocast is switched on or off: the result
    has the more precise dtype of the two.

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
    # torch.cat promotes: half precision with float32 gives float32, and so does float16 with bfloat16.
    return {name: torch.cat([state[name], new[name]], dim=1 if name == "padding_mask" else 2) for name in new}
