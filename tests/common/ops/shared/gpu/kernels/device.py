"""Where the kernels under test run, and how their work is split; comparing with what stays on the CPU."""

from collections.abc import Iterable

import pytest
from torch import Tensor

from common.ops.shared.gpu.launch import interpreted

#: The fixture ``split``: causal Flow-Attention in chunks, and as a walk.
both_splits = pytest.mark.parametrize("split", ["chunks", "walk"], indirect=True)
in_a_walk = pytest.mark.parametrize("split", ["walk"], indirect=True)

DEVICE = "cpu" if interpreted() else "cuda"


def on_device(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The same numbers as new leaves on the device; None stays None."""
    return tuple(None if x is None else x.detach().to(DEVICE).requires_grad_(x.is_floating_point()) for x in tensors)


def on_cpu(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.cpu() for x in tensors)
