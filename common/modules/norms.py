"""The two normalisations of FLASH: LayerNorm for auto-regressive models, ScaleNorm for masked ones."""

import torch
from torch import Tensor, nn

from ..ops.shared.checks import check_choice


class ScaleNorm(nn.Module):
    """x · g / rms(x) over the last dimension, with one learned scalar g, initially 1 (Nguyen and Salazar, 2019)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d), in x's dtype; computed in at least float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.dim}, eps={self.eps}"


NORMS = {"layernorm": nn.LayerNorm, "scalenorm": ScaleNorm}


def build_norm(name: str, dim: int) -> nn.Module:
    """The normalisation called ``name`` over ``dim`` channels; ValueError if it is not in ``NORMS``."""
    check_choice("norm", name, tuple(NORMS))
    return NORMS[name](dim)
