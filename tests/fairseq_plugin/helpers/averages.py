"""The average of checkpoints, which fairseq has in a script of its repository, not in its package."""

from collections.abc import Sequence

import torch
from torch import Tensor


def averaged(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As scripts/average_checkpoints.py: sums of copies, halves as floats, divided in place by their number."""
    sums = {name: (x.float() if x.dtype == torch.float16 else x).clone() for name, x in states[0].items()}
    for name, x in sums.items():
        for state in states[1:]:
            x += state[name]
        if x.is_floating_point():
            x.div_(len(states))
        else:
            x //= len(states)
    return sums
