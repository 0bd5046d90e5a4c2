"""BigBird: softmax over neighbouring, first, last and random chunks of a sequence.

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, C tokens of a chunk, G chunks, r random chunks.
"""

from .interface import bigbird_attention
from .random_chunks import draw_numbers

__all__ = ["bigbird_attention", "draw_numbers"]
