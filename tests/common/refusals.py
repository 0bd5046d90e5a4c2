"""Every error message states the argument, its value, and what is allowed."""

import re

import pytest
import torch
from torch import Tensor


def refused(argument: str, given: str, allowed: str):
    """Expect a ValueError with the message "<argument> ... <given> ... allowed ...: ... <allowed>"."""
    parts = (re.escape(part) for part in (given, "allowed", allowed))
    return pytest.raises(ValueError, match="^" + re.escape(argument) + " .*" + ".*".join(parts))


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """q, k and v with two rows, three heads, five tokens and four channels, except for the given ``shapes``."""
    return {name: torch.randn(shapes.get(name, (2, 3, 5, 4))) for name in "qkv"}
