"""Softmax-free attention to images (Lu et al., NeurIPS 2021): a Gaussian kernel through landmarks.

Legend, for every file of this folder:
    B batch, H heads, Y x X rows and columns of an image, n = Y X tokens, d channels of q, e channels of v, r rows and
    columns of a window that makes a landmark, m = ceil(Y / r) ceil(X / r) landmarks, K x K tokens under a filter of v.
"""

from .interface import MOST_ITERATIONS, soft_attention

__all__ = ["MOST_ITERATIONS", "soft_attention"]
