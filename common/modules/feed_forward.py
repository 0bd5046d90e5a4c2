"""A feed-forward block with SiLU, for gated attention units without a gate (FLASH, Table 1)."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from .norms import build_norm


class FeedForward(nn.Module):
    """x + silu(norm(x) W_1) W_2, both with biases; x (..., d) -> (..., d), O(n d e) with e = ``inner_dim``.

    Args:
        dim: width d.
        inner_dim: width e.
        norm: ``layernorm`` or ``scalenorm``.
        dropout, activation_dropout: probabilities for the output of the branch, and for the input of W_2.
        dropout_layer: builds a dropout module from its probability.

    Raises:
        ValueError: an unknown ``norm``.
    """

    def __init__(
        self,
        dim: int,
        inner_dim: int,
        *,
        norm: str = "layernorm",
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        dropout_layer: Callable[[float], nn.Module] = nn.Dropout,
    ) -> None:
        super().__init__()
        self.norm = build_norm(norm, dim)
        self.in_proj = nn.Linear(dim, inner_dim)
        self.out_proj = nn.Linear(inner_dim, dim)
        self.dropout = dropout_layer(dropout)
        self.activation_dropout = dropout_layer(activation_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights from N(0, 0.02) and biases to 0, as in the gated attention unit."""
        for linear in (self.in_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) -> (..., d)."""
        inner = self.activation_dropout(F.silu(self.in_proj(self.norm(x))))
        return x + self.dropout(self.out_proj(inner))
