"""Depthwise convolution of maps with a filter for each channel."""

from torch import Tensor
from torch.nn import functional as F


def depthwise_conv2d(x: Tensor, filters: Tensor) -> Tensor:
    """Each channel of x (N, h, H, W) convolved with its own filter (h, 1, kh, kw) of odd sides, centred: (N, h, H, W).

    A filter with more rows than columns is applied to transposed maps: for some of 49 rows and more with up to 3
    columns, oneDNN 3.12, which torch 2.14 has, computes gradients in float32 on a CPU that are wrong by a tenth and
    more.
    """
    tall = filters.shape[2] > filters.shape[3]
    if tall:
        x, filters = x.transpose(2, 3), filters.transpose(2, 3)
    out = F.conv2d(x, filters, padding=[filters.shape[2] // 2, filters.shape[3] // 2], groups=filters.shape[0])
    return out.transpose(2, 3) if tall else out
