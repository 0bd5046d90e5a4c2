"""Sparse Sinkhorn attention, literally: one chunk of one head at a time, each with its sorted chunk."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def sinkhorn_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sort_weight: Tensor,
    *,
    max_tokens: int,
    chunk_size: int,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    sort: str = "sinkhorn",
    iterations: int = 5,
    temperature: float = 0.75,
    normaliser: str = "joint",
) -> Tensor:
    """Tay et al. 2020, section 3, one chunk at a time; shapes as in ``sinkhorn_attention``.

    O(n (C + n / C) (d + e)) in Python steps: for comparison only.
    """
    batch, heads, n, d = q.shape
    out = torch.zeros_like(v)
    for b in range(batch):
        real = real_tokens(key_padding_mask, b, n)
        queries = set(real_tokens(query_padding_mask, b, n))
        chunks = [real[i : i + chunk_size] for i in range(0, len(real), chunk_size)]
        for h in range(heads if chunks else 0):
            sums = torch.stack([k[b, h, chunk].sum(0) for chunk in chunks])  # (G, d)
            logits = sums @ sort_weight[h, :, : len(chunks)].to(q.dtype) / temperature
            weights = _sort_weights(logits, sort, iterations)  # (G, G)
            for i, chunk in enumerate(chunks):
                # Place t of the sorted chunk is a mean of place t of all chunks; the last chunk may not have one.
                places = range(len(chunks[0]))
                sources = [[(j, other[t]) for j, other in enumerate(chunks) if t < len(other)] for t in places]
                mixed = [
                    torch.stack([sum(weights[i, j] * x[b, h, token] for j, token in place) for place in sources])
                    for x in (k, v)
                ]
                for token in [token for token in chunk if token in queries]:
                    own = k[b, h, chunk] @ q[b, h, token] / d**0.5
                    moved = mixed[0] @ q[b, h, token] / d**0.5
                    if normaliser == "joint":
                        shares = torch.softmax(torch.cat([own, moved]), dim=0).split([len(own), len(moved)])
                    else:
                        shares = torch.softmax(own, dim=0), torch.softmax(moved, dim=0)
                    total = shares[0] @ v[b, h, chunk] + shares[1] @ mixed[1]
                    out = out.index_put((torch.tensor(b), torch.tensor(h), torch.tensor(token)), total)
    return out


def _sort_weights(logits: Tensor, sort: str, iterations: int) -> Tensor:
    """The weights (G, G) of every chunk in every sorted chunk."""
    weights = torch.exp(logits - logits.max())
    if sort == "softmax":
        return weights / weights.sum(1, keepdim=True)
    for _ in range(iterations):
        weights = weights / weights.sum(1, keepdim=True)
        weights = weights / weights.sum(0, keepdim=True)
    return weights
