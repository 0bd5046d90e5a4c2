"""What the authors' released modules compute after their projections, written out as functions of q, k, v.

From https://github.com/thuml/Flowformer (MIT license, Wu, Wu, Xu, Wang, Long, ICML 2022): ``Flow_Attention.py``,
``Flowformer_CV/flowformer.py`` and ``Flowformer_NLP/flow_attention.py``. The formulas are theirs, constants included;
the code is ours. q (..., n, d), k (..., m, d), v (..., m, e), before the sigmoid -> (..., n, e). The causal ones take
O(n d e) memory, since theirs sum kᵀv over positions without chunks.
"""

import torch
from torch import Tensor

EPS = 1e-6


def full(q: Tensor, k: Tensor, v: Tensor, outer_eps: float = 0.0) -> Tensor:
    """``Flow_Attention`` of the core file; with ``outer_eps`` 1e-6, that of the image model."""
    q, k = q.sigmoid(), k.sigmoid()
    n, m = q.shape[-2], k.shape[-2]
    sink_incoming = 1 / (((q + EPS) * (k.sum(-2, keepdim=True) + EPS)).sum(-1, keepdim=True) + outer_eps)
    source_outgoing = 1 / (((k + EPS) * (q.sum(-2, keepdim=True) + EPS)).sum(-1, keepdim=True) + outer_eps)
    from_sources = (k * source_outgoing).sum(-2, keepdim=True) + EPS
    from_sinks = (q * sink_incoming).sum(-2, keepdim=True) + EPS
    conserved_sink = ((q + EPS) * from_sources).sum(-1, keepdim=True) + outer_eps
    conserved_source = (((k + EPS) * from_sinks).sum(-1, keepdim=True) + outer_eps).clamp(-1, 1)
    sink_allocation = torch.sigmoid(conserved_sink * (n / m))
    source_competition = torch.softmax(conserved_source, dim=-2) * m
    return (q * sink_incoming) @ (k.transpose(-2, -1) @ (v * source_competition)) * sink_allocation


def image_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``Flow_Attention`` of the image model: 1e-6 outside each sum as well."""
    return full(q, k, v, outer_eps=EPS)


def causal(q: Tensor, k: Tensor, v: Tensor, clamp: float = 1.0) -> Tensor:
    """``Flow_Attention_Causal`` of the core file; with ``clamp`` 5, the fairseq module."""
    q, k = q.sigmoid(), k.sigmoid()
    normal = torch.arange(1, q.shape[-2] + 1, dtype=q.dtype)[:, None]
    sink_incoming = normal / ((q + EPS) * (k.cumsum(-2) + EPS)).sum(-1, keepdim=True)
    source_outgoing = normal / ((k + EPS) * (q.cumsum(-2) + EPS)).sum(-1, keepdim=True)
    conserved_sink = ((q + EPS) * ((k * source_outgoing).cumsum(-2) + EPS)).sum(-1, keepdim=True) / normal
    conserved_source = ((k + EPS) * ((q * sink_incoming).cumsum(-2) + EPS)).sum(-1, keepdim=True) / normal
    competing = conserved_source.clamp(-clamp, clamp).exp()
    source_competition = competing / competing.cumsum(-2) * normal
    outer_products = k.unsqueeze(-1) * (v * source_competition).unsqueeze(-2)  # (..., n, d, e)
    aggregated = ((q * sink_incoming / normal).unsqueeze(-2) @ outer_products.cumsum(-3)).squeeze(-2)
    return aggregated * torch.sigmoid(conserved_sink)


def language_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fairseq module: clamp 5, and q not scaled by 1/sqrt(d), as here."""
    return causal(q, k, v, clamp=5.0)
