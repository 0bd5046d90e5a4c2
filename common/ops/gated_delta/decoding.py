"""One token of the gated delta rule after a state."""

import torch
from torch import Tensor


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """``delta_chunks`` of one token, in the few operations that it needs; O(d e).

    q, k (B, H, 1, d), v (B, H, 1, e), beta and log_decay (B, H, 1), or log_decay (B, H, 1, d), memory (B, H, d, e) ->
    the output (B, H, 1, e) and the new memory.
    """
    if log_decay is not None:
        decay = log_decay.exp()
        memory = memory * (decay.unsqueeze(-1) if decay.dim() == 3 else decay.transpose(-2, -1))
    error = (v - k @ memory) * beta.unsqueeze(-1)  # (B, H, 1, e)
    memory = torch.addcmul(memory, k.transpose(-2, -1), error)
    return q @ memory, memory
