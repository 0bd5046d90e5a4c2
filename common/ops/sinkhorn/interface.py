"""Sparse Sinkhorn attention: a chunk attends to itself and to a second chunk from a learned, soft sorting.

Tay, Bahri, Yang, Metzler, Juan, *Sparse Sinkhorn Attention*, ICML 2020, section 3. The paper's causal balancing,
SortCut and Gumbel noise in training are not implemented, so there is no causal form. One linear map of a chunk's summed
keys scores the chunks, as in the Long Range Arena's code (there with a bias, and shared by all heads); the paper has a
network of two layers on summed tokens.

That code (``sinkhorn_attention.py``, 2021) sorts nothing: ``einsum("bskhd,bnhl->bsnhd")`` sums over the chunks and over
the weights separately, so with rows that add up to 1 each "sorted" chunk is the sum of all chunks. Its chunks are
interleaved, as in its local attention. So the Arena's published accuracies are of a different mechanism.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import check_choice, check_masks, check_positive_int, check_query_key_value, shape_of
from ..shared.chunks import split_chunks
from ..shared.packed import takes_segments
from ..shared.padding import put_back, real_first, take, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.score_kernels import score_kernel
from ..shared.token_counts import check_real_tokens

#: How scores of chunks become weights: rows and columns divided by their sums in turn (the paper), or only rows.
SORTS = ("sinkhorn", "softmax")
#: One softmax over the own and the sorted chunk (the paper), or the sum of one over each (the Long Range Arena).
NORMALISERS = ("joint", "separate")
#: The logarithm that stands for a weight of 0.
_NONE = -1e30


@takes_segments("q", "k", "v")
def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sort_weight: Tensor,
    *,
    max_tokens: int,
    chunk_size: int,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    sort: str = "sinkhorn",
    iterations: int = 5,
    temperature: float = 0.75,
    normaliser: str = "joint",
) -> Tensor:
    """softmax(q_i·[K_g ; K'_g] / √d) [V_g ; V'_g] for i in chunk g, with K'_g = Σ_h P_gh K_h and V' likewise.

    K_h are the C keys of chunk h, and P = sort((Σ_(j in g) k_j)·W_h / ``temperature``), with W = ``sort_weight`` (H, d,
    M), M at least ``max_tokens`` / C. Chunks count real tokens. A last chunk of c < C tokens is sorted as the others;
    it only adds to the first c places of a K'_g and V'_g. q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's
    dtype. Masks: bool (B, n), True = padding; a padded query gives 0, and so does a token that is padding as a key. Not
    causal, since a chunk's sum is over all its tokens. Cost: O(n C (d + e) + (n / C) n (d + e)) time and O(n C + (n /
    C)²) memory.

    Args:
        sort: "sinkhorn", rows and columns of exp divided by their sums in turn, ``iterations`` times; "softmax", only
            rows, once. The paper's Gumbel noise in training is not implemented.
        normaliser: "joint", one softmax over both chunks; "separate", one over each, and the sum of both.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask or option that does not fit, or more than ``max_tokens`` real tokens.
    """
    for name, value in {"max_tokens": max_tokens, "chunk_size": chunk_size, "iterations": iterations}.items():
        check_positive_int(name, value)
    check_choice("sort", sort, SORTS)
    check_choice("normaliser", normaliser, NORMALISERS)
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature!r}; allowed: above 0")
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    _check_sort_weight(sort_weight, q, -(-max_tokens // chunk_size))
    count = check_real_tokens(k, key_padding_mask, None, max_tokens)
    order, dtype = real_first(key_padding_mask), compute_dtype(q)
    most_tokens = sort_weight.shape[2] * chunk_size  # later tokens are padding
    queries = zero_padding(zero_padding(q.to(dtype), key_padding_mask), query_padding_mask)
    tensors = (queries, zero_padding(k.to(dtype), key_padding_mask), zero_padding(v.to(dtype), key_padding_mask))
    queries, keys, values = (split_chunks(take(x, order)[:, :, :most_tokens], chunk_size) for x in tensors)
    groups = keys.shape[2]
    seen = torch.arange(groups * chunk_size, device=k.device) < count[:, None]  # (B, G C)
    seen = seen.unflatten(1, (groups, chunk_size))[:, None]  # (B, 1, G, C)
    with autocast_off(q):
        logits = keys.sum(3) @ sort_weight[:, :, :groups].to(dtype) / temperature
        weights = _sort_weights(logits, seen[..., 0], sort, iterations)
        out = _attended(queries, keys, values, weights, seen, normaliser)
    out = out.flatten(2, 3)[:, :, : q.shape[2]]
    out = put_back(F.pad(out, (0, 0, 0, q.shape[2] - out.shape[2])), order)
    return zero_padding(zero_padding(out, key_padding_mask), query_padding_mask).to(v.dtype)


def _check_sort_weight(sort_weight: Tensor, q: Tensor, chunks: int) -> None:
    """Raise ValueError unless ``sort_weight`` is (H, d, M) for q (B, H, n, d), with M at least ``chunks``."""
    is_tensor = isinstance(sort_weight, Tensor) and sort_weight.dim() == 3
    if not is_tensor or tuple(sort_weight.shape[:2]) != (q.shape[1], q.shape[3]) or sort_weight.shape[2] < chunks:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and sort_weight {shape_of(sort_weight)}; allowed: (heads of q, channels of "
            f"q, at least {chunks} chunks)"
        )


def _sort_weights(logits: Tensor, real: Tensor, sort: str, iterations: int) -> Tensor:
    """The weights of every chunk in every sorted chunk, (B, H, G, G), 0 for those that are not ``real`` (B, 1, G)."""
    hidden = ~(real.unsqueeze(-1) & real.unsqueeze(-2))
    if sort == "softmax":
        return score_kernel(logits, "softmax", hidden)
    logits = logits.masked_fill(hidden, _NONE)
    for _ in range(iterations):
        logits = (logits - logits.logsumexp(-1, keepdim=True)).masked_fill(hidden, _NONE)
        logits = (logits - logits.logsumexp(-2, keepdim=True)).masked_fill(hidden, _NONE)
    return logits.exp()


def _attended(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, seen: Tensor, normaliser: str) -> Tensor:
    """Attention of chunks of queries (B, H, G, C, d) to their own and their sorted chunk; ``seen`` (B, 1, G, C)."""
    sorted_k, sorted_v = ((weights @ x.flatten(3)).unflatten(3, x.shape[3:]) for x in (k, v))
    # All chunks before the last are full: a place of a sorted chunk is empty only if it is empty in the first chunk.
    hidden = ~torch.stack([seen, seen[:, :, :1].expand_as(seen)], dim=3).unsqueeze(3)  # (B, 1, G, 1, 2, C)
    scores = (
        torch.stack([q @ x.transpose(-2, -1) for x in (k, sorted_k)], dim=4) / q.shape[4] ** 0.5
    )  # (B, H, G, C, 2, C)
    if normaliser == "joint":
        shares = score_kernel(scores.flatten(4), "softmax", hidden.flatten(4)).unflatten(4, scores.shape[4:])
    else:
        shares = score_kernel(scores, "softmax", hidden)
    return shares[..., 0, :] @ v + shares[..., 1, :] @ sorted_v
