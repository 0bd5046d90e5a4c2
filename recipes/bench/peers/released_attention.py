"""The formulas of the authors' released modules after their projections, as functions of q, k and v.

From https://github.com/thuml/Flowformer (MIT license, Wu, Wu, Xu, Wang, Long, ICML 2022): ``Flow_Attention.py``,
``Flowformer_CV/flowformer.py`` and ``Flowformer_NLP/flow_attention.py``. The formulas and constants are theirs,
and so is the kind of operation of each step, which decides its cost; the code is our own. q (..., n, d), k
(..., m, d), v (..., m, e), before the sigmoid -> (..., n, e). The causal ones take O(n d e) memory, since they sum
kᵀv over positions without chunks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6


def full(q: Tensor, k: Tensor, v: Tensor, clamp: float = 1.0) -> Tensor:
    """``Flow_Attention`` of the core file, where ``clamp``, the bound on Ô, is 1."""
    return _full(q, k, v, _contracted, 0.0, clamp)


def image_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``Flow_Attention`` of the image model: products and sums instead of einsum, 1e-6 added outside as well."""
    return _full(q, k, v, _summed, EPS, 1.0)


def _contracted(receivers: Tensor, total: Tensor) -> Tensor:
    return torch.einsum("...ld,...d->...l", receivers, total)


def _summed(receivers: Tensor, total: Tensor) -> Tensor:
    return (receivers * total.unsqueeze(-2)).sum(-1)


def _full(
    q: Tensor, k: Tensor, v: Tensor, product: Callable[[Tensor, Tensor], Tensor], outer_eps: float, clamp: float
) -> Tensor:
    q, k = q.sigmoid(), k.sigmoid()
    n, m = q.shape[-2], k.shape[-2]

    def flow(receivers: Tensor, total: Tensor) -> Tensor:  # (..., r, d), (..., d) -> (..., r)
        return product(receivers + EPS, total + EPS) + outer_eps

    sink_incoming = 1.0 / flow(q, k.sum(-2))
    source_outgoing = 1.0 / flow(k, q.sum(-2))
    conserved_sink = flow(q, (k * source_outgoing.unsqueeze(-1)).sum(-2))
    conserved_source = flow(k, (q * sink_incoming.unsqueeze(-1)).sum(-2)).clamp(-clamp, clamp)
    allocation = torch.sigmoid(conserved_sink * (n / m))
    competition = torch.softmax(conserved_source, dim=-1) * m
    context = k.transpose(-2, -1) @ (v * competition.unsqueeze(-1))  # (..., d, e)
    return (q @ context) * sink_incoming.unsqueeze(-1) * allocation.unsqueeze(-1)


def causal(q: Tensor, k: Tensor, v: Tensor, clamp: float = 1.0) -> Tensor:
    """``Flow_Attention_Causal`` of the core file, where ``clamp`` is 1; with 5, the fairseq module."""
    q, k = q.sigmoid(), k.sigmoid()
    normal = torch.arange(1, q.shape[-2] + 1, dtype=q.dtype, device=q.device)

    def flow(receivers: Tensor, givers: Tensor) -> Tensor:  # both (..., n, d) -> (..., n)
        return torch.einsum("...ld,...ld->...l", receivers + EPS, givers.cumsum(-2) + EPS)

    sink_incoming = normal / flow(q, k)
    source_outgoing = normal / flow(k, q)
    conserved_sink = flow(q, k * source_outgoing.unsqueeze(-1)) / normal
    conserved_source = flow(k, q * sink_incoming.unsqueeze(-1)) / normal
    competing = conserved_source.clamp(-clamp, clamp).exp()
    competition = competing / competing.cumsum(-1) * normal
    products = torch.einsum("...ld,...lm->...ldm", k, v * competition.unsqueeze(-1)).cumsum(-3)  # (..., n, d, e)
    aggregated = torch.einsum("...ld,...ldm->...lm", q * (sink_incoming / normal).unsqueeze(-1), products)
    return aggregated * torch.sigmoid(conserved_sink).unsqueeze(-1)


def language_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fairseq module: clamp 5, and q not scaled by 1/sqrt(d), as here."""
    return causal(q, k, v, clamp=5.0)
