"""A call of the kernels of causal Flow-Attention: what each way to split the work takes besides tensors."""

from typing import NamedTuple

from torch import Tensor

from .causal_weights import Positions
from .options import FlowOptions


class Call(NamedTuple):
    """The arguments that have no gradient."""

    padding: Tensor | None  # (B, n), True = padding
    counted: Tensor | None  # tokens before these (B,), int64; None for none
    options: FlowOptions
    chunk_size: int  # of plain PyTorch; kernels have their own
    positions: Positions | None  # of the tokens as a single chunk, where kernels do not count them themselves
