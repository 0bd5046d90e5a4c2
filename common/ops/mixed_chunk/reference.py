"""Mixed chunk attention, literally: every weight of every query written out."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import bias_of, real_tokens, weights_of


def mixed_chunk_attention_reference(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    bias: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    kernel: str = "relu2",
    local: bool = True,
    linear: bool = True,
    first_softmax: bool = False,
    first_to_all: bool = False,
) -> Tensor:
    """FLASH, section 4, one query of one head at a time; arguments as in ``mixed_chunk_attention``.

    O(n² (s + e)) in Python steps: for comparison only.
    """
    if q_quad.dim() == 3:
        options = dict(bias=bias, causal=causal, key_padding_mask=key_padding_mask, kernel=kernel, local=local)
        options.update(linear=linear, first_softmax=first_softmax, first_to_all=first_to_all, chunk_size=chunk_size)
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
                    to_all = first_to_all and position == start
                    if to_all:
                        name, keys = "softmax", range(len(real))
                    by = math.sqrt(s) if name == "softmax" else chunk_size
                    scores = torch.stack(
                        [
                            (q_quad[b, h, i] * k_quad[b, h, real[other]]).sum() / by
                            + (0.0 if to_all else bias_of(bias, chunk_size, h, position - start, other - start))
                            for other in keys
                        ]
                    )
                    for weight, other in zip(weights_of(scores, name), keys):
                        total = total + weight * v[b, h, real[other]]
                if linear:
                    by = chunk_size if causal else len(real)
                    for other in range(start) if causal else range(len(real)):
                        score = (q_lin[b, h, i] * k_lin[b, h, real[other]]).sum() / by
                        total = total + score * v[b, h, real[other]]
                out = out.index_put((torch.tensor(b), torch.tensor(h), torch.tensor(i)), total)
    return out
