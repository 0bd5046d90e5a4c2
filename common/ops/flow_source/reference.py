"""Flow-Attention to a source that has its own flows, literally: row by row, one token at a time."""

import math

import torch
from torch import Tensor

from ..shared.reference_tools import positive_features, real_tokens

#: For each form: added to both factors of a flow, added to a flow, and whether the softmax is multiplied by its length.
_FORMS = {"paper": (0.0, 0.0, False), "released": (1e-6, 0.0, True), "released_vision": (1e-6, 1e-6, True)}


def flow_source_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    source_q: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    form: str = "released",
    clamp: float | None = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
) -> Tensor:
    """The formulas of ``flow_source_attention``, arguments and shapes as there. O(n m (d + e)): for comparison only.

    Each row of the batch is computed from its real tokens only; padded queries give 0.
    """
    constants, bound = _FORMS[form], math.inf if clamp is None or form == "paper" else clamp
    rows = []
    for b in range(q.shape[0]):
        out = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        sources = real_tokens(key_padding_mask, b, k.shape[2])
        if sources:
            keys = [positive_features(k[b, :, j], phi) for j in sources]  # (H, d) each
            source_sinks = [positive_features(source_q[b, :, j], phi) for j in sources]
            # The source by itself: its queries are the sinks.
            incoming = [_flow(s, sum(keys), constants) for s in source_sinks]  # (H,) each
            outgoing = [_flow(x, sum(source_sinks), constants) for x in keys]
            shares = sum(s / i[:, None] for s, i in zip(source_sinks, incoming))
            conserved = torch.stack([_flow(x, shares, constants).clamp(-bound, bound) for x in keys])  # (sources, H)
            weights = _competition(conserved, competition, constants)
            # Each target by itself.
            units = sum(x / o[:, None] for x, o in zip(keys, outgoing))
            for t in real_tokens(query_padding_mask, b, q.shape[2]):
                sink = positive_features(q[b, :, t], phi)
                received = [(sink * x).sum(-1) / _flow(sink, sum(keys), constants) for x in keys]
                total = sum((r * w)[:, None] * v[b, :, j] for r, w, j in zip(received, weights, sources))
                worth = _flow(sink, units, constants)
                out[t] = total * (worth.sigmoid()[:, None] if allocation == "sigmoid" else 1)
        rows.append(torch.stack(out, dim=1))  # (H, n, e)
    return torch.stack(rows)  # (B, H, n, e)


def _flow(receiver: Tensor, giver: Tensor, form: tuple[float, float, bool]) -> Tensor:
    """receiver times giver, (H, d) both, with the form's constants: (H,)."""
    inner, outer, _ = form
    return ((receiver + inner) * (giver + inner)).sum(-1) + outer


def _competition(conserved: Tensor, kind: str, form: tuple[float, float, bool]) -> Tensor:
    """The weights of the sources from their conserved flows, (sources, H) both."""
    if kind == "none":
        return torch.ones_like(conserved)
    if kind == "sigmoid":
        return conserved.sigmoid()
    return conserved.softmax(0) * (len(conserved) if form[2] else 1)
