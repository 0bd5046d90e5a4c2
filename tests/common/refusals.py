"""Every error message says three things: the argument, its value, and what is allowed."""

import re

import pytest
import torch
from torch import Tensor


def refused(argument: str, given: str, allowed: str):
    """Expect a ValueError with the message "<argument> ... <given> ... allowed ...: ... <allowed>"."""
    parts = (re.escape(part) for part in (given, "allowed", allowed))
    return pytest.raises(ValueError, match="^" + re.escape(argument) + " .*" + ".*".join(parts))


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """q, k and v of two rows, three heads, five tokens and four channels, but for the ``shapes`` given."""
    return {name: torch.randn(shapes.get(name, (2, 3, 5, 4))) for name in "qkv"}


#: By name: tensors in place of some of ``tensors()``, the argument, what the message says it is, what is allowed.
WRONG_TENSORS = {
    "q of three dimensions": ({"q": torch.randn(2, 5, 4)}, "q", "(2, 5, 4)", "4 dimensions"),
    "v of five dimensions": ({"v": torch.randn(1, 2, 3, 5, 4)}, "v", "(1, 2, 3, 5, 4)", "4 dimensions"),
    "a list for k": ({"k": [1.0]}, "k", "list", "a tensor"),
    "no v": ({"v": None}, "v", "NoneType", "a tensor"),
    "integers": ({"k": torch.ones(2, 3, 5, 4, dtype=torch.long)}, "k", "torch.int64", "floating point"),
    "no tokens": (tensors(q=(2, 3, 0, 4), k=(2, 3, 0, 4), v=(2, 3, 0, 4)), "q", "(2, 3, 0, 4)", "at least one token"),
    "no sources": (tensors(k=(2, 3, 0, 4), v=(2, 3, 0, 4)), "k", "(2, 3, 0, 4)", "at least one token"),
    "no channels": (tensors(v=(2, 3, 5, 0)), "v", "(2, 3, 5, 0)", "one channel"),
    "other channels": (tensors(k=(2, 3, 5, 6)), "k", "(2, 3, 5, 6) and q (2, 3, 5, 4)", "channels"),
    "other heads": (tensors(k=(2, 1, 5, 4), v=(2, 1, 5, 4)), "k", "(2, 1, 5, 4)", "heads"),
    "other batch": (tensors(q=(1, 3, 5, 4)), "k", "(2, 3, 5, 4) and q (1, 3, 5, 4)", "the same batch"),
    "fewer values": (tensors(v=(2, 3, 4, 4)), "v", "(2, 3, 4, 4) and k (2, 3, 5, 4)", "tokens"),
    "one value head": (tensors(v=(2, 1, 5, 4)), "v", "(2, 1, 5, 4)", "heads"),
    "two dtypes": ({"k": torch.randn(2, 3, 5, 4).half()}, "q, k and v", "torch.float16", "one dtype"),
    "two devices": ({"v": torch.randn(2, 3, 5, 4, device="meta")}, "q, k and v", "meta", "one device"),
}

#: By name: a mask for ``tensors()``, what the message says it is, what is allowed.
WRONG_MASKS = {
    "floating point": (torch.zeros(2, 5), "torch.float32", "torch.bool"),
    "bytes": (torch.zeros(2, 5, dtype=torch.uint8), "torch.uint8", "torch.bool"),
    "a list": ([[False] * 5] * 2, "list", "torch.bool"),
    "for each head": (torch.zeros(2, 3, 5, dtype=torch.bool), "(2, 3, 5)", "(2, 5)"),
    "one row": (torch.zeros(1, 5, dtype=torch.bool), "(1, 5)", "(2, 5)"),
    "too short": (torch.zeros(2, 4, dtype=torch.bool), "(2, 4)", "(2, 5)"),
    "an attention mask": (torch.zeros(5, 5, dtype=torch.bool), "(5, 5)", "(2, 5)"),
    "elsewhere": (torch.zeros(2, 5, dtype=torch.bool, device="meta"), "meta", "device of the input, cpu"),
}
