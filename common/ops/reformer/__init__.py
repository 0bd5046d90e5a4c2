"""LSH attention of the Reformer (Kitaev, Kaiser, Levskaya, ICLR 2020).

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q, e channels of v, R rounds of hashing, D directions of a round,
    2D buckets of a round, C tokens of a chunk, G chunks. Queries are the keys.
"""

from .hashes import draw_rotations
from .interface import reformer_attention

__all__ = ["draw_rotations", "reformer_attention"]
