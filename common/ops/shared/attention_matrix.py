"""The attention matrix of any mechanism, read from its outputs for values that are unit vectors."""

from collections.abc import Callable

import torch
from torch import Tensor


def read_attention_matrix(attend: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """The matrix A (B, H, n, m) of a function ``attend`` that is linear in its values: ``attend(v)`` is A v.

    Only shape, dtype and device of v (B, H, m, e) are used: ``attend`` is called m / e times, each time with the unit
    vectors of e sources as the channels. Every call begins with the same state of torch's generators, which is restored
    at the end, so that directions that are redrawn in training are the same in all calls. O(n m) memory.
    """
    sources, channels = v.shape[2], v.shape[3]
    devices = [v.device] if v.device.type == "cuda" else []
    columns = []
    for first in range(0, sources, channels):
        some = min(channels, sources - first)
        values = torch.zeros_like(v)
        values[:, :, torch.arange(first, first + some), torch.arange(some)] = 1
        with torch.random.fork_rng(devices):
            columns.append(attend(values)[..., :some])
    return torch.cat(columns, dim=-1)
