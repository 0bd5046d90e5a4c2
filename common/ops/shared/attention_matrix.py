"""The map that an attention implies, read off its outputs for values that are unit vectors."""

from collections.abc import Callable

import torch
from torch import Tensor


def read_attention_matrix(attend: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """The map A (B, H, n, m) of an ``attend`` that is linear in its values: ``attend(v)`` is A v.

    v (B, H, m, e) gives shape, dtype and device alone: ``attend`` is called m / e times, each time with the unit
    vectors of e sources as the channels. Every call begins with the same state of torch's generators, which stay as
    they were, so that directions that are drawn anew in training are the same ones in all calls. O(n m) memory.
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
