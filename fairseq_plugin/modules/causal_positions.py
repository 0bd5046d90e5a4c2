"""Positions by a convolution over the past, for causal models of audio.

Legend: B batch, C width, T frames, k the size of the convolution.
"""

import torch
from torch import Tensor, nn

from .multihead_attention import IncrementalState

#: The entry of a state that holds the last frames.
_KEY = "positions"


class CausalPositions(nn.Sequential):
    """wav2vec 2.0's convolution of positions, ``stock``, moved so that a frame reads itself and the k - 1 before it.

    In ``stock``, a frame reads k / 2 frames on either side. Weights and their names do not change. Before the first
    frame there are zeros. While ``state`` is set, frames continue those of ``state``, which is updated.
    """

    def __init__(self, stock: nn.Sequential) -> None:
        super().__init__(*stock)
        self.state: IncrementalState | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, T) -> (B, C, T)."""
        size = self[0].kernel_size[0]
        before = (self.state or {}).get(_KEY, {}).get("frames", x.new_zeros(*x.shape[:2], size - 1))
        read = torch.cat([before, x], 2)
        if self.state is not None:
            self.state[_KEY] = {"frames": read[:, :, read.shape[2] - size + 1 :].clone()}
        # ``stock`` pads k / 2 zeros on either side, so its output i reads from i - k / 2.
        return super().forward(read)[:, :, size // 2 : size // 2 + x.shape[2]]
