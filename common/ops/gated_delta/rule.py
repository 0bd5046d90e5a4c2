"""The gated delta rule over several tokens, by fla's kernels or in plain PyTorch."""

import torch
from torch import Tensor

from ..shared.gpu.launch import several_on_gpu
from .causal import delta_in_blocks


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    memory: Tensor,
    chunk_size: int,
    precision: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, n, e) and the last memory (B, H, d, e), by fla's kernels or by ``delta_in_blocks``.

    q, k (B, H, n, d), v (B, H, n, e), beta (B, H, n), and log_decay (B, H, n), (B, H, n, d) or None. ``precision`` is
    the dtype in which q, k and v were given, in which kernels may multiply.
    """
    tensors = q, k, v, beta, log_decay, memory
    if several_on_gpu(q):
        from .gpu import KERNELS  # not above: CPUs do not need it

        if KERNELS.apply_to(precision, *tensors):
            return KERNELS(precision, chunk_size, *tensors)
    return delta_in_blocks(*tensors, chunk_size)
