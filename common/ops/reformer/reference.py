"""LSH attention, literally: the set of keys of every token in every round, and one softmax over their union."""

import torch
from torch import Tensor

from ..shared.reference_tools import real_tokens


def reformer_attention_reference(
    q: Tensor,
    v: Tensor,
    *,
    rotations: Tensor,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    chunk_size: int = 64,
) -> Tensor:
    """Kitaev et al. 2020, equations 2 to 6, one token at a time; shapes as in ``reformer_attention``.

    O(n² R (d + e)): for comparison only. Every key counts once, in however many rounds it is found, as in equation 6
    with log N. The README explains why causal attention uses windows of a bucket.
    """
    batch, heads, n = q.shape[:3]
    out = torch.zeros_like(v)
    for b in range(batch):
        real = real_tokens(key_padding_mask, b, n)
        queries = set(real_tokens(query_padding_mask, b, n)) & set(real)
        for h in range(heads):
            keys_by_round = [
                _keys_of(q[b, h], rotation, real, chunk_size, causal) for rotation in rotations.to(q.dtype)
            ]
            for i in queries:
                keys = sorted(set().union(*(keys[i] for keys in keys_by_round)))
                keys = [j for j in keys if j != i] or [i]  # the token itself only if there is no other
                units = q[b, h, keys] / torch.clamp(q[b, h, keys].norm(dim=-1, keepdim=True), min=1e-12)
                weights = torch.softmax(units @ q[b, h, i], dim=0)
                index = (torch.tensor(b), torch.tensor(h), torch.tensor(i))
                out = out.index_put(index, (weights.unsqueeze(-1) * v[b, h, keys]).sum(0))
    return out


def _keys_of(q: Tensor, rotation: Tensor, real: list[int], chunk_size: int, causal: bool) -> dict[int, list[int]]:
    """The keys that each real token of one head finds in one round, in sorted order."""
    bucket = {i: int(torch.cat([q[i] @ rotation, -(q[i] @ rotation)]).argmax()) for i in real}
    order = sorted(real, key=lambda i: (bucket[i], i))
    if causal:
        earlier = {i: [j for j in order if bucket[j] == bucket[i] and j <= i] for i in real}
        return {i: keys[-chunk_size:] for i, keys in earlier.items()}
    chunk = {i: index // chunk_size for index, i in enumerate(order)}
    return {i: [j for j in order if bucket[j] == bucket[i] and abs(chunk[j] - chunk[i]) <= 1] for i in real}
