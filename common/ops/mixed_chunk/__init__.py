"""Mixed chunk attention: quadratic inside chunks, linear across them (FLASH, ICML 2022, section 3.2).

Legend, for every file of this folder:
    B batch, H heads, n tokens, s channels of q and k, e channels of v, C tokens of a chunk, G = ceil(n / C) chunks.
    ``quad``: of the quadratic term, inside chunks; ``lin``: of the linear term, across chunks.
    ``grad_x`` is the gradient of the loss with respect to x.

``README.md`` has the derivation.
"""

from .interface import mixed_chunk_attention
from .parts import linear_term_of_parts_before
from .sequence import MixedChunkOptions

__all__ = [
    "MixedChunkOptions",
    "linear_term_of_parts_before",
    "mixed_chunk_attention",
]
