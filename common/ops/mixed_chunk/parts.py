"""The linear term over earlier parts of a sequence, for parts that start at a chunk and are computed separately."""

from collections.abc import Callable

from torch import Tensor

from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype


def linear_term_of_parts_before(
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    chunk_size: int,
    sums_before: Callable[[Tensor], tuple[Tensor, None]],
) -> Tensor:
    """q_lin / C · Σ k_lin vᵀ over the parts before this one (FLASH, Eq. 8): (B, H, n, e) in v's dtype; O(n s e).

    q_lin, k_lin (B, H, n, s) and v (B, H, n, e) are of this part; ``padding_mask`` (B, n), True = padding. If each part
    begins with a chunk, the causal output is the sum of this and ``mixed_chunk_attention`` of the part alone.
    The first result of ``sums_before`` for a part's sum (B, H, s, e) is the total of the sums of the parts before it.
    """
    dtype = compute_dtype(v)
    with autocast_off(v):
        q, k, values = (zero_padding(in_dtype(x, dtype), padding_mask) for x in (q_lin, k_lin, v))
        return ((q / chunk_size) @ sums_before(k.transpose(-2, -1) @ values)[0]).to(v.dtype)
