"""Reusable memory for the large tensors of a block of causal Flow-Attention, forward and backward."""

import math
from typing import NamedTuple

from torch import Tensor

from ..shared.precision import compute_dtype


class Workspace(NamedTuple):
    """Memory for each large tensor of some chunks; None for new memory, which autograd needs.

    All are pieces of one tensor. Separate allocations would be returned to the system one by one, which then has to
    find and clear them again: at 256 tokens and 8 heads of 64 channels this was a third of the time on a CPU.
    """

    features: Tensor | None = None  # (2, B, H, G, C, d)
    to_sinks: Tensor | None = None  # (B, H, G, C, C)
    to_sources: Tensor | None = None  # (B, H, G, C, C)
    weighted: Tensor | None = None  # (B, H, G, C, e)
    chunk_kv: Tensor | None = None  # (B, H, G, d, e)
    carried_kv: Tensor | None = None  # (B, H, G, d, e)
    total: Tensor | None = None  # (B, H, G, C, e): forward in the place of ``to_sources``, backward in its own
    grad_q: Tensor | None = None  # (B, H, G, C, d), in the place of ``chunk_kv``
    grad_k: Tensor | None = None  # (B, H, G, C, d), in the place of ``to_sinks``


#: For use with autograd.
NO_WORKSPACE = Workspace()


class Workspaces:
    """The memory for consecutive blocks: one allocation as long as blocks have the same size."""

    def __init__(self, chunk_size: int, backward: bool) -> None:
        self._chunk_size, self._backward = chunk_size, backward
        self._shapes, self._workspace = None, NO_WORKSPACE

    def of(self, q: Tensor, v: Tensor) -> Workspace:
        """Workspace for one block of whole chunks, reused while shapes stay the same."""
        shapes = (q.shape, v.shape)
        if shapes != self._shapes:
            self._workspace = NO_WORKSPACE  # frees it before more is allocated
            self._shapes = shapes
            self._workspace = _workspace_of(q, v, min(self._chunk_size, q.shape[2]), self._backward)
        return self._workspace


def _workspace_of(q: Tensor, v: Tensor, size: int, backward: bool) -> Workspace:
    """Memory for whole chunks of ``size`` tokens; q (B, H, n, d), v (B, H, n, e).

    2 d + 2 C + e + 2 d e / C numbers per token and head, and e more for a backward pass, if d = e = C.
    """
    d, e = q.shape[3], v.shape[3]
    chunks = (*q.shape[:2], q.shape[2] // size)
    features, scores, values = (*chunks, size, d), (*chunks, size, size), (*chunks, size, e)
    places = [[(2, *features)], [scores, features], [scores, values], [values]]
    places += [[(*chunks, d, e), features], [(*chunks, d, e)]]
    places += [[values]] if backward else []
    sizes = [max(map(math.prod, shapes)) for shapes in places]
    pieces = q.new_empty(sum(sizes), dtype=compute_dtype(q)).split(sizes)
    views = [[piece[: math.prod(x)].view(x) for x in shapes] for piece, shapes in zip(pieces, places)]
    total = views[6][0] if backward else views[2][1]
    return Workspace(*(x[0] for x in views[:6]), total, views[4][1], views[1][1])
