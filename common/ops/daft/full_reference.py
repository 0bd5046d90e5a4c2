"""DAFT-full, literally: the exponentials of all visible keys for each token and channel."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def daft_full_reference(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor | tuple[Tensor, Tensor],
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """DAFT, equation 5, one token at a time; arguments as in ``daft_full``. O(T² d): for comparison only."""
    w = w if isinstance(w, Tensor) else w[0] @ w[1].transpose(0, 1)
    out = torch.zeros_like(v)
    for b in range(k.shape[0]):
        real = real_tokens(key_padding_mask, b, k.shape[1])
        for position, t in enumerate(real):
            seen = real[: position + 1] if causal else real
            logits = torch.stack([k[b, other] + w[position, i] for i, other in enumerate(seen)])  # (seen, d)
            # A constant per channel cancels between the two sums of the equation.
            weights = torch.exp(logits - logits.max(0, keepdim=True).values)
            row = (weights * torch.stack([v[b, other] for other in seen])).sum(0) / weights.sum(0)
            out = out.clone()
            out[b, t] = row if q is None else torch.sigmoid(q[b, t]) * row
    return out
