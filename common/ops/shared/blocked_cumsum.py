"""Elementwise running sums with decay in blocks of tokens, in PyTorch's differentiable functions.

Short blocks of tokens are summed token by token, all blocks at once, and the ends of the blocks in the same way. Each
product of decays is formed separately, from factors of at most 1.
"""

import torch
from torch import Tensor

from .chunks import chunk_length, split_chunks

#: Tokens of a block.
_BLOCK = 16


def cumsum_in_blocks(x: Tensor, log_decay: Tensor, initial: Tensor) -> Tensor:
    """``decayed_cumsum`` for ``initial`` (B, H, ...); O(size of x)."""
    if x.shape[2] == 1:
        return torch.addcmul(x, log_decay.exp(), initial.unsqueeze(2))
    length, size = x.shape[2], chunk_length(_BLOCK, x.shape[2])
    x, log_decay = split_chunks(x, size), split_chunks(log_decay, size)  # (B, H, blocks, tokens, ...)
    last, *rest = x.unbind(3)
    sums = [last]
    for new, kept in zip(rest, log_decay.exp().unbind(3)[1:]):
        last = torch.addcmul(new, kept, last)
        sums.append(last)
    ends = cumsum_in_blocks(last, log_decay.sum(3), initial)  # (B, H, blocks, ...)
    before = torch.cat([initial.unsqueeze(2), ends[:, :, :-1]], dim=2).unsqueeze(3)
    return _joined(torch.addcmul(torch.stack(sums, 3), log_decay.cumsum(3).exp(), before)).narrow(2, 0, length)


def _joined(x: Tensor) -> Tensor:
    """(B, H, blocks, tokens, ...) -> (B, H, n, ...). Flatten does not support batches of gradients here."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])
