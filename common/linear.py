"""Linear layers on the faster of torch's two matrix libraries.

torch gives float32 products to MKL, which leaves half of the vector units of CPUs other than Intel's unused, and
convolutions to oneDNN, which does not. A linear layer is a convolution of one pixel.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# With fewer tokens, or multiply-adds, what oneDNN does before its product takes longer than what it saves.
_MIN_TOKENS = 128
_MIN_PRODUCTS = 2**24
# What torch asks of a convolution of one pixel before it goes to oneDNN: more numbers than these, and so many images or
# more than one thread.
_NUMBERS = 20480
_IMAGES = 16


class Linear(nn.Linear):
    """``nn.Linear``, the same parameters and numbers, as a convolution of one pixel where that is faster.

    That is for float32 and 128 tokens or more on CPUs with AVX-512 that are not Intel's; O(M C C') for M tokens of C
    channels. It has the name of torch's, by which fairseq's quantisation knows layers.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) -> (..., C')."""
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        else:
            return self._forward(x)

    @torch.jit.unused
    def _forward(self, x: Tensor) -> Tensor:
        images = self._images(x)
        if images == 0:
            return F.linear(x, self.weight, self.bias)
        # (..., C) -> (I, C, 1, M / I), channels last
        image = x.contiguous().view(images, 1, -1, self.in_features).permute(0, 3, 1, 2)
        out = F.conv2d(image, self.weight[:, :, None, None], self.bias)
        return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], self.out_features)  # (I, C', 1, M / I) -> (..., C')

    def _images(self, x: Tensor) -> int:
        """As how many images x (..., C) is convolved: 0 for not at all."""
        plain = all(_is_plain(tensor) for tensor in (x, self.weight))
        if not plain or x.shape[-1] != self.in_features or x.numel() <= _NUMBERS or not convolutions_are_faster():
            return 0
        tokens = x.numel() // self.in_features
        if tokens < _MIN_TOKENS or tokens * self.weight.numel() < _MIN_PRODUCTS:
            return 0
        if tokens % _IMAGES:
            return 1 if torch.get_num_threads() > 1 else 0
        return _IMAGES


def _is_plain(x: Tensor) -> bool:
    """Whether operations on ``x`` run as they stand, on a CPU and in float32."""
    return (
        not (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"))
        and type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.dtype == torch.float32
    )


@functools.cache
def convolutions_are_faster() -> bool:
    """Whether this machine's float32 products are faster in oneDNN than in MKL."""
    cpu = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpu.exists()
        and "GenuineIntel" not in cpu.read_text()
    )


def use_faster_linear(module: nn.Module) -> None:
    """Make every ``nn.Linear`` of ``module`` a ``Linear`` in place: parameters, hooks and names stay."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear
