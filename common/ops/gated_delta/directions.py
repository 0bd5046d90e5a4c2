"""Queries, keys and values as the memory gets them: activated, and queries and keys as unit vectors."""

from torch import Tensor
from torch.nn import functional as F

#: Activations of queries and keys, or of values.
ACTIVATIONS = ("silu", "none")
#: Normalisations of queries and keys.
QK_NORMS = ("l2", "none")
#: Added to |x|² before its root.
EPS = 1e-6


def directed(
    q: Tensor, k: Tensor, v: Tensor, qk_activation: str, qk_norm: str, v_activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q / √d, k and v, activated and normalised, in their shapes; 0 where they are 0."""
    queries, keys = (_normalised(_activated(x, qk_activation), qk_norm) for x in (q, k))
    return queries * q.shape[3] ** -0.5, keys, _activated(v, v_activation)


def _activated(x: Tensor, activation: str) -> Tensor:
    return F.silu(x) if activation == "silu" else x


def _normalised(x: Tensor, norm: str) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() if norm == "l2" else x
