"""Flow-Attention, literally: the paper's algorithms row by row without padding, one token at a time.

Slow and readable; all other implementations are compared with it. Runs in any dtype, float64 included.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..shared.reference_tools import either_padding, kept, positive_features, real_tokens


class Constants(NamedTuple):
    """The constants in which the paper's algorithms and the authors' modules differ."""

    inner: float  # added to both factors of a flow
    outer: float  # added to a flow
    counts: bool  # the softmax times its length, I times n / m


#: Constants of each form; the reference has its own copy, so that tests find a wrong constant elsewhere.
CONSTANTS = {
    "paper": Constants(0.0, 0.0, False),
    "released": Constants(1e-6, 0.0, True),
    "released_vision": Constants(1e-6, 1e-6, True),
}


def flow_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    form: str = "released",
    clamp: float | None = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
) -> Tensor:
    """Algorithms 1 and 2 (ICML 2022, appendix), arguments and shapes as in ``flow_attention``.

    Each row of the batch is computed from its real tokens only; padded sinks give 0. O(n m d) not causal,
    O(n² d + n d e) causal. With gates ``log_decay`` (causal), each token counts in every sum, and in the number of
    tokens so far, with the factor by which it has decayed.
    """
    if causal and competition == "softmax_heads":
        raise ValueError("competition is 'softmax_heads'; allowed with causal attention: softmax, sigmoid, none")
    rows = []
    for b in range(q.shape[0]):
        sinks = real_tokens(query_padding_mask, b, q.shape[2])
        sources = real_tokens(key_padding_mask, b, k.shape[2])
        if causal:
            sinks = sources = real_tokens(either_padding(query_padding_mask, key_padding_mask), b, q.shape[2])
        out = [torch.zeros_like(v[b, :, 0]) for _ in range(q.shape[2])]  # (H, e) each
        if sinks and sources:
            features_q = positive_features(q[b, :, sinks], phi)  # (H, sinks, d)
            features_k = positive_features(k[b, :, sources], phi)  # (H, sources, d)
            bound = math.inf if clamp is None or form == "paper" else clamp
            tensors = features_q, features_k, v[b, :, sources]
            options = CONSTANTS[form], bound, competition, allocation
            if causal:
                past = [kept(log_decay, b, sources, i, [j for j in sources if j <= i]) for i in sources]
                attended = _algorithm_2(*tensors, past, *options)  # (H, sinks, e)
            else:
                attended = _algorithm_1(*tensors, *options)
            for index, i in enumerate(sinks):
                out[i] = attended[:, index]
        rows.append(torch.stack(out, dim=1))  # (H, n, e)
    return torch.stack(rows)  # (B, H, n, e)


def _flow(receivers: Tensor, sums: Tensor, form: Constants) -> Tensor:
    """receivers (H, r, d) times sums (H, d), with the form's constants: (H, r)."""
    return ((receivers + form.inner) * (sums[:, None] + form.inner)).sum(-1) + form.outer


def _algorithm_1(
    q: Tensor, k: Tensor, v: Tensor, form: Constants, clamp: float, competition: str, allocation: str
) -> Tensor:
    """Not causal: q (H, n, d), k (H, m, d), v (H, m, e) -> (H, n, e)."""
    n, m = q.shape[1], k.shape[1]
    incoming = _flow(q, k.sum(1), form)  # I (H, n)
    outgoing = _flow(k, q.sum(1), form)  # O (H, m)
    conserved_incoming = _flow(q, (k / outgoing[..., None]).sum(1), form)
    conserved_outgoing = _flow(k, (q / incoming[..., None]).sum(1), form).clamp(-clamp, clamp)
    if form.counts:
        conserved_incoming = conserved_incoming * n / m
    competing = {
        "softmax": conserved_outgoing.softmax(-1) * (m if form.counts else 1),
        "sigmoid": conserved_outgoing.sigmoid(),
        "none": torch.ones_like(conserved_outgoing),
        "softmax_heads": conserved_outgoing.softmax(0) * (m if form.counts else 1),
    }[competition]
    allocated = {
        "sigmoid": conserved_incoming.sigmoid(),
        "softmax": conserved_incoming.softmax(-1) * (n if form.counts else 1),
        "none": torch.ones_like(conserved_incoming),
    }[allocation]
    attention = (q / incoming[..., None]) @ k.transpose(-2, -1)  # (H, n, m)
    return allocated[..., None] * (attention @ (competing[..., None] * v))


def _algorithm_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: list[Tensor | float],
    form: Constants,
    clamp: float,
    competition: str,
    allocation: str,
) -> Tensor:
    """Causal: q, k (H, n, d), v (H, n, e) -> (H, n, e). Position i uses positions up to i only.

    ``past`` has for each i the decay factors of these positions, (H, i + 1, 1 or d), or 1.0 without gates.
    """
    incoming: list[Tensor] = []  # I_i, O_i, Ô_i, Î_i: each (H,)
    outgoing: list[Tensor] = []
    conserved_outgoing: list[Tensor] = []
    conserved_incoming: list[Tensor] = []
    weights: list[Tensor] = []  # w_i (H, 1 or d)
    outputs = []
    for i in range(q.shape[1]):
        keys, sinks, q_i, k_i = k[:, : i + 1], q[:, : i + 1], q[:, i], k[:, i]
        keep = torch.ones_like(keys[..., :1]) if isinstance(past[i], float) else past[i]  # (H, i + 1, 1 or d)
        c = keep.sum(1)
        incoming.append(_mean_flow(q_i, (keep * keys).sum(1), c, form))
        outgoing.append(_mean_flow(k_i, (keep * sinks).sum(1), c, form))
        given_k = (keep * keys / torch.stack(outgoing, 1)[..., None]).sum(1)
        given_q = (keep * sinks / torch.stack(incoming, 1)[..., None]).sum(1)
        conserved_incoming.append(_mean_flow(q_i, given_k, c, form))
        conserved_outgoing.append(_mean_flow(k_i, given_q, c, form).clamp(-clamp, clamp))
        weights.append(_last_weight(conserved_outgoing, keep, competition))
        allocated = _last_weight(conserved_incoming, keep, allocation)
        sink = q_i * allocated / (incoming[i][:, None] * c)  # (H, d)
        attention = (keep * keys * torch.stack(weights, 1) * sink[:, None]).sum(-1)  # (H, i + 1)
        outputs.append((attention[..., None] * v[:, : i + 1]).sum(1))
    return torch.stack(outputs, 1)


def _mean_flow(receiver: Tensor, sums: Tensor, count: Tensor, form: Constants) -> Tensor:
    """receiver (H, d) times sums (H, d) divided by the count (H, 1 or d) of each channel: (H,)."""
    flow = ((receiver + form.inner) * (sums + form.inner) / count).sum(-1)
    return flow + (form.outer / count).mean(-1)


def _last_weight(flows: list[Tensor], keep: Tensor, kind: str) -> Tensor:
    """The weight (H, 1 or d) of the last of ``flows`` (H,), given the decays ``keep``; the softmax times the count."""
    if kind == "none":
        return torch.ones_like(flows[-1])[:, None]
    if kind == "sigmoid":
        return flows[-1].sigmoid()[:, None]
    flow = torch.stack(flows, 1)[..., None]  # (H, i + 1, 1)
    exponentials = (flow - flow.max(1, keepdim=True).values).exp()
    return exponentials[:, -1] / (keep * exponentials).sum(1) * keep.sum(1)
