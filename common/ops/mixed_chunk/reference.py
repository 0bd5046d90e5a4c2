"""Mixed chunk attention, literally: every weight of every query written out."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import bias_of, kept, real_tokens, weights_of


def mixed_chunk_attention_reference(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    bias: Tensor | None = None,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    kernel: str = "relu2",
    local: bool = True,
    linear: bool = True,
    first_softmax: bool = False,
    first_to_all: bool = False,
    overlap: bool = False,
    chunk_summaries: bool = False,
) -> Tensor:
    """FLASH, section 3.2, one query of one head at a time; arguments as in ``mixed_chunk_attention``.

    O(n² (s + e)) in Python steps: for comparison only.
    """
    if q_quad.dim() == 3:
        options = dict(bias=bias, causal=causal, key_padding_mask=key_padding_mask, kernel=kernel, local=local)
        options.update(
            linear=linear,
            overlap=overlap,
            chunk_summaries=chunk_summaries,
            first_softmax=first_softmax,
            first_to_all=first_to_all,
            chunk_size=chunk_size,
        )
        options["log_decay"] = log_decay
        heads = (x.unsqueeze(1) for x in (q_quad, k_quad, q_lin, k_lin, v))
        return mixed_chunk_attention_reference(*heads, **options).squeeze(1)
    batch, heads, n, s = q_quad.shape
    out = torch.zeros_like(v)
    for b in range(batch):
        real = real_tokens(key_padding_mask, b, n)
        for h in range(heads):
            for position, i in enumerate(real):
                start = position - position % chunk_size  # of this token's chunk
                total = torch.zeros_like(v[b, h, i])  # (e,)
                if local:
                    stop = position + 1 if causal else min(start + chunk_size, len(real))
                    name = "softmax" if first_softmax and position == 0 else kernel
                    keys = range(start, stop)
                    if overlap:
                        last = position + 1 if causal else min(start + 2 * chunk_size, len(real))
                        keys = range(max(start - chunk_size, 0), last)
                    to_all = first_to_all and position == start
                    if to_all:
                        name, keys = "softmax", range(len(real))
                    chunks_seen = (2 if causal else 3) if overlap else 1
                    by = math.sqrt(s) if name == "softmax" else chunks_seen * chunk_size
                    scores = torch.stack(
                        [
                            (q_quad[b, h, i] * k_quad[b, h, real[other]]).sum() / by
                            + (0.0 if to_all else _bias(bias, chunk_size, overlap, h, position, other, start))
                            for other in keys
                        ]
                    )
                    for weight, other in zip(weights_of(scores, name), keys):
                        total = total + weight * v[b, h, real[other]]
                if linear:
                    by = chunk_size if causal else len(real)
                    for other in range(start) if causal else range(len(real)):
                        keep = 1.0 if log_decay is None else kept(log_decay, b, real, i, [real[other]])[h, 0]
                        score = (q_lin[b, h, i] * k_lin[b, h, real[other]] * keep).sum() / by
                        total = total + score * v[b, h, real[other]]
                if chunk_summaries:
                    total = total + _of_summaries(
                        q_quad, k_quad, v, (b, h, i), real, start if causal else len(real), chunk_size
                    )
                out = out.index_put((torch.tensor(b), torch.tensor(h), torch.tensor(i)), total)
    return out


def _bias(bias: Tensor | None, chunk_size: int, overlap: bool, head: int, query: int, key: int, start: int):
    """One entry of the bias, by positions in the sequence; ``start`` is the position where the query's chunk begins."""
    if bias is None or not overlap:
        return bias_of(bias, chunk_size, head, query - start, key - start)
    return (bias if bias.dim() == 1 else bias[head])[query - key + 2 * chunk_size - 1]


def _of_summaries(
    q: Tensor, k: Tensor, v: Tensor, place: tuple[int, int, int], real: list[int], stop: int, chunk_size: int
) -> Tensor:
    """Softmax attention of the query at ``place`` (b, h, i) to the chunks of the first ``stop`` real tokens: (e,)."""
    b, h, i = place
    chunks = [real[begin : min(begin + chunk_size, stop)] for begin in range(0, stop, chunk_size)]
    if not chunks:
        return torch.zeros_like(v[b, h, i])
    keys = [sum(k[b, h, j] for j in chunk) / len(chunk) for chunk in chunks]
    values = [sum(v[b, h, j] for j in chunk) / len(chunk) for chunk in chunks]
    scores = torch.stack([(q[b, h, i] * key).sum() / math.sqrt(q.shape[3]) for key in keys])
    return sum(weight * value for weight, value in zip(weights_of(scores, "softmax"), values))
