"""The patterns of a Sparse Transformer as masks: the tokens that each query sees."""

from typing import NamedTuple

from torch import Tensor

#: The paper's two factorisations.
PATTERNS = ("fixed", "strided")


class Pattern(NamedTuple):
    """The options that determine, in addition to causality, the tokens that each query sees."""

    name: str
    stride: int  # l
    columns: int  # c, of the fixed pattern


def sees(i: Tensor, j: Tensor, pattern: Pattern) -> Tensor:
    """Whether tokens at positions i see tokens at positions j <= i, integers of shapes that broadcast: a bool mask."""
    stride = pattern.stride
    if pattern.name == "fixed":
        return (i // stride == j // stride) | (j % stride >= stride - pattern.columns)
    return (i - j < stride) | ((i - j) % stride == 0)
