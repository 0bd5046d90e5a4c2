"""Zeros at padding in front of convolutions over time, so that padding does not change real frames.

fairseq's subsampling convolutions add a bias to padding, and the next convolution mixes the result into the last real
frames; the depthwise convolution of a conformer does the same. Here hooks set their inputs to 0 at padding. Names and
shapes of parameters do not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .multihead_attention import read_padding


class ConvolutionPadding:
    """Masks the inputs of the convolutions in a module, of subsampling or of positions, inside ``of``."""

    def __init__(self, module: nn.Module) -> None:
        self.real: Tensor | None = None
        for convolution in module.modules():
            if isinstance(convolution, nn.Conv1d | nn.Conv2d):
                convolution.register_forward_pre_hook(self)

    @contextmanager
    def of(self, padding_mask: Tensor) -> Iterator[None]:
        """Inside, ``padding_mask`` (B, T), True = padding, is that of the input of ``module``."""
        self.real = ~padding_mask
        try:
            yield
        finally:
            self.real = None

    def __call__(self, convolution: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        """torch's hook before ``convolution``, whose input is (B, C, t) or (B, C, t, features)."""
        if self.real is None:
            return None
        (x,) = inputs
        real = self.real
        while real.shape[1] > x.shape[2]:
            real = real[:, ::2]  # all strides of subsampling are 2
        return (_masked(x, real),)


class ConformerPadding:
    """Masks the input of the depthwise convolution of a fairseq conformer ``layer``, by the mask of its attention.

    The attention is called before the convolution, also when activations are computed again in a backward pass.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.padding_mask: Tensor | None = None
        layer.self_attn.register_forward_pre_hook(self.read, with_kwargs=True)
        layer.conv_module.depthwise_conv.register_forward_pre_hook(self)

    def read(self, attention: nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
        """torch's hook before ``attention``: remember its mask (B, T), True = padding."""
        self.padding_mask = read_padding(options["key_padding_mask"])

    def __call__(self, convolution: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        """torch's hook before ``convolution``, whose input is (B, C, T)."""
        return None if self.padding_mask is None else (_masked(inputs[0], ~self.padding_mask),)


def _masked(x: Tensor, real: Tensor) -> Tensor:
    """x (B, C, t, ...) with 0 where ``real`` (B, at most t) is False or ends."""
    real = F.pad(real, (0, x.shape[2] - real.shape[1]))
    return x.masked_fill(~real.view(len(x), 1, -1, *[1] * (x.dim() - 3)), 0.0)
