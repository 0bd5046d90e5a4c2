"""The five measurements, with the same sizes and inputs for every version.

Legend: B batch, n tokens, D width, H heads, d channels of a head.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

BATCH, REAL, PADDED, HEADS, CHANNELS = 2, 192, 64, 4, 16
TOKENS, WIDTH = REAL + PADDED, HEADS * CHANNELS
SEED = 1
#: (x (B, n, D), padding (B, n) with True = padding or None for no padding, causal) -> outputs (B, n, D).
Attend = Callable[[Tensor, Tensor | None, bool], Tensor]


class Changes(NamedTuple):
    """Relative changes of the outputs of real tokens; exact attention has 0 everywhere."""

    content: float  # different vectors in the padding on the right
    right: float  # padding on the right instead of none
    left: float  # padding on the left instead of none
    later: float | None  # different later tokens, without padding; None if not causal
    neighbour: float  # a different second sequence in the batch, both padded on the right


def measure(attend: Attend, causal: bool) -> Changes:
    """Measure all changes of one version; every call draws weights and random numbers from the same seed."""
    x, other = torch.randn(2, BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    padding = (torch.arange(TOKENS) >= REAL).expand(BATCH, -1)
    real, half = x[:, :REAL], TOKENS // 2

    @torch.no_grad()
    def run(x: Tensor, padding: Tensor | None = None) -> Tensor:
        torch.manual_seed(SEED)
        return attend(x, padding, causal)

    alone, right = run(real), run(x, padding)[:, :REAL]
    left = run(torch.cat([x[:, REAL:], real], 1), padding.flip(1))[:, PADDED:]
    content = run(torch.cat([real, other[:, REAL:]], 1), padding)[:, :REAL]
    neighbour = run(torch.stack([x[0], other[1]]), padding)[:1, :REAL]
    changes = Changes(
        content=_change(content, right),
        right=_change(right, alone),
        left=_change(left, alone),
        later=None,
        neighbour=_change(neighbour, right[:1]),
    )
    if not causal:
        return changes
    later = run(torch.cat([x[:, :half], other[:, half:]], 1))[:, :half]
    return changes._replace(later=_change(later, run(x)[:, :half]))


def projected(x: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Project x (B, n, D) to heads (B, H, n, d) for each of ``names``; linear layers have torch's default weights."""
    layers = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names}
    return {name: layer(x).unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2) for name, layer in layers.items()}


def merged(heads: Tensor) -> Tensor:
    """Merge heads: (B, H, n, d) -> (B, n, D)."""
    return heads.transpose(1, 2).flatten(2)


def _change(changed: Tensor, before: Tensor) -> float:
    return ((changed - before).norm() / before.norm()).item()
