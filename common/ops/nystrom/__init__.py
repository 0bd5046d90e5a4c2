"""Nyström attention (Xiong et al., AAAI 2021): softmax attention through landmarks.

Legend, for every file of this folder:
    B batch, H heads, n tokens, d channels of q and k, e channels of v, m landmarks, K tokens under the convolution.
"""

from .interface import MOST_ITERATIONS, nystrom_attention

__all__ = ["MOST_ITERATIONS", "nystrom_attention"]
