"""Models whose linear layers run in both ways that ``common.linear`` knows."""

from typing import Callable, Tuple

import pytest
import torch
from torch import Tensor, nn

from common import linear

from .compare import assert_close, gradients


def compare_both_ways(model: nn.Module, forward: Callable[[], Tensor]) -> Tuple[int, int]:
    """Assert that ``forward`` and all gradients are the same numbers; how many convolutions were in each way."""
    parameters = list(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_MIN_TOKENS", "_MIN_PRODUCTS", "_NUMBERS"):
            patch.setattr(linear, name, 1)
        found = []
        for faster in (True, False):
            patch.setattr(linear, "convolutions_are_faster", lambda faster=faster: faster)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                out = forward()
            counts = [event.count for event in profiler.key_averages() if event.key == "aten::conv2d"]
            found.append((sum(counts), out, gradients(out, parameters)))
    (many, out, grads), (few, expected, wanted) = found
    assert_close("output", out, expected)
    for (name, _), actual, reference in zip(model.named_parameters(), grads, wanted):
        assert_close(f"gradient of {name}", actual, reference, 1e-4)
    return many, few
