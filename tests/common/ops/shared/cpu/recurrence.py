"""Causal sums by their recurrence, literally, and inputs for them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: Kinds of gates.
GATES = (None, "head", "channel")
#: By name, as ``common.ops.shared.feature_maps`` describes them.
MAPS = {
    None: lambda x: x,
    "sigmoid": torch.sigmoid,
    "elu+1": lambda x: F.elu(x) + 1.0,
    "relu": lambda x: F.relu(x) + 1e-6,
}


class Inputs(NamedTuple):
    """The tensors of ``common.ops.shared.cpu.sums.causal_sums``, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    sum_kv: Tensor | None = None
    sum_k: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """Those that are not None, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    def each(self, change) -> "Inputs":
        """``change`` of each tensor."""
        return Inputs(*(None if x is None else change(x) for x in self))

    def leaves(self, dtype: torch.dtype | None = None) -> "Inputs":
        """Copies that require gradients, with the same strides."""
        return self.each(lambda x: x.detach().clone().to(dtype or x.dtype).requires_grad_())


def random_inputs(
    n: int,
    f: int = 7,
    e: int = 5,
    gates: str | None = None,
    begun: bool = False,
    batch: int = 3,
    heads: int = 2,
    strength: float = 0.3,
) -> Inputs:
    """Positive features, any values, gates exp(-2 ``strength``) to 1, in float64 and laid out as (B, n, H, c)."""
    generator = torch.Generator().manual_seed(1000 * n + 10 * f + e)

    def host(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).transpose(1, 2)

    log_decay, before = None, (None, None)
    if gates is not None:
        log_decay = -2 * strength * host(batch, n, heads, *([f] if gates == "channel" else []))
    q, k, v = host(batch, n, heads, f), host(batch, n, heads, f), 2 * host(batch, n, heads, e) - 1
    if begun:
        before = host(batch, f, heads, e), host(batch, f, heads)
    return Inputs(q, k, v, log_decay, *before).leaves()


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    sum_kv: Tensor | None = None,
    sum_k: Tensor | None = None,
    divisor: tuple[float, float] | None = None,
    phi: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, weights, and the last sums."""
    q, k = MAPS[phi](q), MAPS[phi](k)
    log_decay = torch.zeros_like(k[:1, :1, :, :1]) if log_decay is None else log_decay
    if log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    sum_k = torch.zeros_like(k[:, :, 0]) if sum_k is None else sum_k
    sum_kv = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]) if sum_kv is None else sum_kv
    values, weights = [], []
    for t in range(q.shape[2]):
        gate = torch.exp(log_decay[:, :, t])
        sum_k = gate * sum_k + k[:, :, t]
        sum_kv = gate[..., None] * sum_kv + k[:, :, t, :, None] * v[:, :, t, None, :]
        values.append((q[:, :, t, :, None] * sum_kv).sum(2))
        weights.append((q[:, :, t] * sum_k).sum(2, keepdim=True))
    values, weights = torch.stack(values, 2), torch.stack(weights, 2)
    if divisor is not None:
        eps, least = divisor
        values = values / (weights + eps).clamp(min=least)
    return values, weights, sum_kv, sum_k
