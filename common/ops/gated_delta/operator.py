"""The gated delta rule on a CPU as one operator for torch.compile, whose graph would have hundreds of operations."""

import torch
from torch import Tensor

from ..shared.gpu.operators import differentiable_operator
from .causal_backward import delta_blocks


def delta_operator(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, chunk_size: int, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """``delta_blocks``, opaque to torch.compile."""
    return _operator(q, k, v, beta, log_decay, memory, chunk_size)


def _run(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, memory: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    out, last = delta_blocks(q, k, v, beta, log_decay, chunk_size, memory)
    # The outputs of an operator must not be its inputs.
    return out.contiguous(), last.clone(memory_format=torch.contiguous_format)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, memory: Tensor, _: int
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), memory.new_empty(memory.shape)


_operator = differentiable_operator(
    "gated_delta_attention", ("q", "k", "v", "beta", "log_decay?", "memory"), "int chunk_size", 2, _run, _fake
)
