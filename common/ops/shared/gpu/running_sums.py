"""``feature_sums.causal_sums`` and ``decayed_sums`` by fla's kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..chunked_sums import sums_in_chunks
from ..state import State
from . import fla


def causal_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    state: State | None,
    log_decay: Tensor | None,
    precision: torch.dtype | None,
) -> tuple[Tensor, Tensor, State]:
    """``feature_sums.causal_sums`` where ``KERNELS`` apply: a channel of ones beside v sums the weights."""
    f, e = q.shape[3], v.shape[3]
    odd = f % 2  # which fla refuses in half precision
    more = 8 - e % 8  # rows of 16 bytes in half precision
    extra = v.new_zeros(v.shape[0], v.shape[2], v.shape[1], more)
    extra[..., 0] = 1.0
    v = torch.cat([v.transpose(1, 2), extra], dim=-1).transpose(1, 2)  # in fla's layout
    initial = None
    if state is not None:
        initial = F.pad(torch.cat([state["sum_kv"], state["sum_k"].unsqueeze(-1)], dim=-1), (0, more - 1, 0, odd))
    if odd:
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
        log_decay = F.pad(log_decay, (0, 1)) if log_decay is not None and log_decay.dim() == 4 else log_decay
    out, last = KERNELS(precision, chunk_size, q, k, v, None, log_decay, initial)
    last = last[:, :, :f]
    return out[..., :e], out[..., e : e + 1], {"sum_k": last[..., e], "sum_kv": last[..., :e]}


def _plain(
    q: Tensor, k: Tensor, v: Tensor, _: None, log_decay: Tensor | None, initial: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Values and the last ``sum_kv`` in plain PyTorch."""
    state = None if initial is None else {"sum_k": torch.zeros_like(initial[..., 0]), "sum_kv": initial}
    out, _, state = sums_in_chunks(q, k, v, chunk_size, state, log_decay)
    return out, state["sum_kv"]


#: Of q, k, v, None, log_decay and the sum before the first token: values, and the sum after the last.
KERNELS = fla.Kernels("running_sums", _plain)
