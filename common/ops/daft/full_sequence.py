"""DAFT-full of a whole sequence in plain PyTorch: two matrix products with exp(w), at every length and range.

``README.md`` has the causal algorithm, and the ranges of keys and biases for which float32 is enough.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..shared.padding import put_back, real_first, take, zero_padding
from ..shared.precision import compute_dtype
from ..shared.tracing import may_checkpoint, runs_eagerly
from .weighted_means import WeightedMean, headroom, mean_of_sums, merge

#: Tokens of the smallest chunks of the causal algorithm, whose exponentials are computed pair by pair.
CHUNK_SIZE = 8

# Weights are products exp(k) exp(w). They underflow if keys and biases both span more than this; see README.md.
_SPAN_OF_FLOAT32 = 90.0
_SPAN_OF_FLOAT64 = 600.0
_REFUSAL = (
    "allowed: a span (largest minus smallest) of at most 600, or 90 in a compiled graph of float32, of one of the two, "
    "the keys of a channel or the position biases of a token"
)
# A bias this far below the largest of its row has no weight, whatever the keys.
_NEGLIGIBLE_BIAS = -2000.0


def whole_sequence(k: Tensor, v: Tensor, w: Tensor, causal: bool, padding_mask: Tensor | None) -> Tensor:
    """The weighted means of v (B, T, d) under the weights exp(k_t' + w_tt'), for w (T, T): (B, T, d).

    ``padding_mask`` bool (B, T), True = padding, on any side; w counts real tokens. O(T² d) time in matrix products.

    Raises:
        ValueError: keys and biases both span more than float64 holds.
    """
    dtype, order = compute_dtype(k), real_first(padding_mask)
    k, v = (take(zero_padding(x.to(dtype).unsqueeze(1), padding_mask), order).squeeze(1) for x in (k, v))
    after_real = None  # the padding, which is after the real tokens now (B, T)
    if padding_mask is not None:
        after_real = torch.arange(k.shape[1], device=k.device) >= (~padding_mask).sum(1, keepdim=True)
        # A row without real tokens has nothing to sum; it is not masked here, and zeroed at the end.
        after_real = after_real & ~padding_mask.all(1, keepdim=True)
    enough = _sufficient_dtype(k, w, causal, after_real)
    k, v, w = (x.to(enough) for x in (k, v, w))
    if causal:  # no real query sees the padding
        out = _causal(k, v, w)
    else:
        if after_real is not None:
            k = k.masked_fill(after_real[..., None], -torch.inf)
            if enough != dtype:  # the largest bias of a row must belong to a real token
                w = w.masked_fill(after_real[:, None], -torch.inf)  # (B, T, T)
        out = attend_to_all(k, v, w).mean
    return put_back(out.to(dtype).unsqueeze(1), order).squeeze(1)


def attend_to_all(k: Tensor, v: Tensor, w: Tensor) -> WeightedMean:
    """Every query of w (..., n, m) over all keys k, v (..., m, d): two matrix products with exp(w); (..., n, d).

    A maximum per channel of k and one per row of w are subtracted first; they cancel between the two sums.
    """
    over_k = k.detach().amax(-2, keepdim=True) - headroom()  # (..., 1, d)
    over_w = w.detach().amax(-1, keepdim=True) - headroom()  # (..., n, 1)
    key = torch.exp(k - over_k)  # (..., m, d)
    sums = torch.exp(w - over_w) @ torch.cat([key * v, key], dim=-1)  # (..., n, 2d)
    weighted, weight = sums.chunk(2, dim=-1)
    return mean_of_sums(weighted, weight, over_k + over_w)


def exceeds_float32(k: Tensor, w: Tensor) -> Tensor:
    """Whether keys (..., m, d) and biases (n, m) both span more than float32 holds: a tensor of one bool."""
    span_k = (k.amax(-2) - k.amin(-2)).max()
    span_w = (w.amax(-1) - w.amin(-1)).max()
    return torch.minimum(span_k, span_w) > 90.0  # _SPAN_OF_FLOAT32, which TorchScript cannot read


def _sufficient_dtype(k: Tensor, w: Tensor, causal: bool, after_real: Tensor | None) -> torch.dtype:
    """The dtype of k, or float64 if its range is too small for k (B, T, d) and w (T, T).

    The common case costs two passes over w. A graph cannot choose by value: a graph of torch.compile or torch.export
    stops with an error if float32 is not enough, and other tracing or transforms use float64.
    """
    # Not no_grad(): torch's pipelining cannot cut an exported graph that switches gradients off and on.
    k, w, compiling = k.detach(), w.detach(), torch.compiler.is_compiling()
    if k.numel() == 0 or k.device.type == "meta":
        return k.dtype
    if not compiling and not runs_eagerly(k, w):
        return torch.float64
    span_w = _span_of_rows(w, causal).max()
    limit = _SPAN_OF_FLOAT64 if k.dtype == torch.float64 else _SPAN_OF_FLOAT32
    if not compiling and not bool(span_w > limit):
        return k.dtype
    span_k = _span_of_columns(k, after_real).max()
    # Without the mask that ``whole_sequence`` adds in float64, a row's largest bias may belong to padding.
    smaller = span_w if compiling and after_real is not None and not causal else torch.minimum(span_k, span_w)
    if compiling:
        torch._assert_async(~(smaller > limit), _REFUSAL)
        return k.dtype
    if bool(torch.minimum(span_k, span_w) > _SPAN_OF_FLOAT64):
        raise ValueError(
            f"the keys of a channel span {span_k.item():.4g} and the position biases of a token {span_w.item():.4g}; "
            f"{_REFUSAL}"
        )
    masked = after_real is not None and not causal
    return torch.float64 if masked or bool(span_k > limit) else k.dtype


def _span_of_rows(w: Tensor, causal: bool) -> Tensor:
    """The largest minus the smallest visible bias of each row: (T,)."""
    if not causal:
        return w.amax(-1) - w.amin(-1)
    return _largest_visible(w) + _largest_visible(-w)


def _largest_visible(w: Tensor) -> Tensor:
    """The largest entry of each row of w (T, T) up to its diagonal: (T,)."""
    later = torch.ones(w.shape, dtype=torch.bool, device=w.device).triu(1)
    return w.detach().masked_fill(later, -torch.inf).amax(-1)


def _span_of_columns(k: Tensor, after_real: Tensor | None) -> Tensor:
    """The largest minus the smallest real key of each channel of k (B, T, d): (B, d)."""
    if after_real is None:
        return k.amax(1) - k.amin(1)
    after_real = after_real[..., None]
    return k.masked_fill(after_real, -torch.inf).amax(1) - k.masked_fill(after_real, torch.inf).amin(1)


def _causal(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Each token over itself and earlier tokens, in chunks that double: (B, T, d).

    Chunks of 8 tokens are computed pair by pair. Then every second chunk attends to the chunk before it, and the two
    become one chunk of twice the size, until one chunk holds all tokens. So each product is over keys that all its
    queries see.
    """
    length = k.shape[1]
    # A constant per row cancels; without it, large biases would round the logarithms of weights.
    w = (w - _largest_visible(w)[:, None]).clamp(min=_NEGLIGIBLE_BIAS)
    padded = _padded_length(length)
    missing = padded - length
    k, v = (F.pad(x, (0, 0, 0, missing)) for x in (k, v))
    w = F.pad(w, (0, missing, 0, missing))
    again = length > CHUNK_SIZE and may_checkpoint()
    means = checkpoint(_smallest_chunks, k, v, w, use_reentrant=False) if again else _smallest_chunks(k, v, w)
    size = CHUNK_SIZE
    while size < padded:
        pairs, remaining = divmod(padded, 2 * size)
        whole = pairs * 2 * size
        parts = [] if pairs == 0 else [_double_chunks(means, k, v, w, pairs, size)]
        if remaining > size:  # a last pair whose second chunk is short
            start, middle = whole, whole + size
            before = attend_to_all(k[:, start:middle], v[:, start:middle], w[middle:, start:middle])
            tail = merge(before, WeightedMean(*(x[:, middle:] for x in means)))
            parts += [WeightedMean(*(x[:, start:middle] for x in means)), tail]
        elif remaining:
            parts.append(WeightedMean(*(x[:, whole:] for x in means)))
        means = WeightedMean(*(torch.cat(x, dim=1) for x in zip(*parts)))
        size *= 2
    return means.mean[:, :length]


def _padded_length(length: int) -> int:
    """``length`` rounded up to a multiple of ``CHUNK_SIZE``.

    In a compiled graph, which is compiled for each number of chunks, rounded up to 1, 2, 3, 4, 6, 8, ... chunks.
    """
    if not torch.compiler.is_compiling():
        return length + -length % CHUNK_SIZE
    size = CHUNK_SIZE
    while size < length:
        size *= 2
    return size * 3 // 4 if size > 2 * CHUNK_SIZE and length <= size * 3 // 4 else size


def _double_chunks(means: WeightedMean, k: Tensor, v: Tensor, w: Tensor, pairs: int, size: int) -> WeightedMean:
    """The first ``pairs`` pairs of chunks; the second chunk of each pair is merged with its view of the first."""
    whole = pairs * 2 * size
    # (T, T) -> (P, 2S, P, 2S) -> its diagonal blocks (P, 2S, 2S)
    diagonal = w[:whole, :whole].view(pairs, 2 * size, pairs, 2 * size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    k, v, mean, log_weight = (x[:, :whole].unflatten(1, (pairs, 2, size)) for x in (k, v, *means))  # (B, P, 2, S, d)
    before = attend_to_all(k[:, :, 0], v[:, :, 0], diagonal[:, size:, :size])
    second = merge(before, WeightedMean(mean[:, :, 1], log_weight[:, :, 1]))
    joined = (torch.stack([old[:, :, 0], new], dim=2) for old, new in zip((mean, log_weight), second))
    return WeightedMean(*(x.flatten(1, 3) for x in joined))  # (B, P, 2, S, d) -> (B, T', d)


def _smallest_chunks(k: Tensor, v: Tensor, w: Tensor) -> WeightedMean:
    """Chunks of ``CHUNK_SIZE`` tokens, each query over the keys of its chunk up to itself; O(T d CHUNK_SIZE) memory."""
    groups = k.shape[1] // CHUNK_SIZE
    diagonal = w.view(groups, CHUNK_SIZE, groups, CHUNK_SIZE).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (G, C, C)
    later = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=k.device).triu(1)
    k, v = (x.unflatten(1, (groups, 1, CHUNK_SIZE)) for x in (k, v))  # (B, G, 1, C, d)
    logits = (k + diagonal[..., None]).masked_fill(later[..., None], -torch.inf)  # (B, G, C, C, d)
    mean = (logits.softmax(3) * v).sum(3)  # (B, G, C, d)
    return WeightedMean(mean.flatten(1, 2), logits.logsumexp(3).flatten(1, 2))
