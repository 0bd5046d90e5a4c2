"""The gated delta rule (Yang, Kautz, Hatamizadeh, ICLR 2025), and without its gate the delta rule of DeltaNet.

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, C tokens of a chunk, G chunks, N = B H.
"""

from .directions import ACTIVATIONS, QK_NORMS
from .interface import gated_delta_attention

__all__ = ["ACTIVATIONS", "QK_NORMS", "gated_delta_attention"]
