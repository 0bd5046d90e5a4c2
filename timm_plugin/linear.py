"""Linear layers on the faster of torch's two matrix libraries.

torch gives float32 products to MKL, which leaves half of the vector units of CPUs other than Intel's unused, and
convolutions to oneDNN, which does not. A linear layer is a convolution of one pixel.
"""

import functools
from pathlib import Path

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn import functional as F

# What torch asks of a convolution of one pixel before it goes to oneDNN.
_MIN_BATCH_OF_ONE_THREAD = 16
_MIN_NUMBERS = 20480


@register_notrace_module  # FX must not trace into it: which way it takes depends on the input.
class PointwiseLinear(nn.Linear):
    """``nn.Linear``, the same parameters and numbers, as a convolution of one pixel where that is faster.

    That is for float32 tokens (B, N, C) on CPUs with AVX-512 that are not Intel's; O(B N C C').
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) -> (..., C')."""
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        else:
            return self._forward(x)

    @torch.jit.unused
    def _forward(self, x: Tensor) -> Tensor:
        if not self._convolves(x):
            return F.linear(x, self.weight, self.bias)
        image = x.contiguous().unsqueeze(1).permute(0, 3, 1, 2)  # (B, N, C) -> (B, C, 1, N), channels last
        out = F.conv2d(image, self.weight[:, :, None, None], self.bias)
        return out.permute(0, 2, 3, 1).flatten(0, 1)  # (B, C', 1, N) -> (B, N, C')

    def _convolves(self, x: Tensor) -> bool:
        return (
            not (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"))
            and x.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and x.dim() == 3
            and x.numel() > _MIN_NUMBERS
            and (x.shape[0] >= _MIN_BATCH_OF_ONE_THREAD or torch.get_num_threads() > 1)
            and convolutions_are_faster()
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


def make_pointwise(module: nn.Module) -> None:
    """Turn every ``nn.Linear`` below ``module`` into a ``PointwiseLinear`` of the same parameters."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                layer = PointwiseLinear(child.in_features, child.out_features, child.bias is not None, device="meta")
                layer.weight, layer.bias = child.weight, child.bias
                setattr(parent, name, layer)
