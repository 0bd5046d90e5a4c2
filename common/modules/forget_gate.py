"""A gate, computed from each token, that decides how much of the running sums is kept."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.shared.checks import check_choice, check_positive_int
from ..ops.shared.log_sigmoid import log_sigmoid
from ..ops.shared.precision import autocast_off, compute_dtype
from .linear_weights import weights_of

#: One gate for each head, or one for each feature of a head's keys.
FORGETS = ("head", "channel")
#: No gate: sums keep everything, as in the papers.
NONE = "none"
#: Number of tokens that the first and the last gate initially remember; the others are spaced logarithmically.
_REMEMBERED = (32.0, 1024.0)
#: Rank of the map from tokens to the gates of channels, as in gated linear attention (Yang et al., ICML 2024).
_RANK = 16


class ForgetGate(nn.Module):
    """log sigmoid(W x + b): the token x (B, n, D) -> log_decay (B, H, n) by head, or (B, H, n, f) by channel.

    W is initially 0, and the biases are spread so that gates remember 32 to 1,024 tokens: sums start with several long
    ranges, which training shortens or lengthens. By channel, W is a product of rank 16. The papers of the mechanisms
    that use this gate do not have it. Cost: O(n D H), and by channel O(n (D + H f)).

    Raises:
        ValueError: ``forget`` is not in ``FORGETS``; a size is no integer of at least 1.
    """

    def __init__(self, forget: str, width: int, heads: int, features: int) -> None:
        super().__init__()
        check_choice("forget", forget, FORGETS)
        for name, value in {"width": width, "heads": heads, "features": features}.items():
            check_positive_int(name, value)
        self.forget, self.width, self.heads = forget, width, heads
        self.features = features if forget == "channel" else None
        inner = width if self.features is None else min(_RANK, width)
        self.down_proj = None if self.features is None else nn.Linear(width, inner, bias=False)
        self.gate_proj = nn.Linear(inner, heads * (self.features or 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        if self.down_proj is not None:
            self.down_proj.reset_parameters()
        nn.init.zeros_(self.gate_proj.weight)
        shortest, longest = (math.log(tokens) for tokens in _REMEMBERED)
        # Spread over the channels of each head, or else over the heads.
        gates = self.features or self.heads
        remembered = torch.linspace(shortest, longest, gates).exp() if gates > 1 else torch.tensor([128.0])
        with torch.no_grad():
            # sigmoid(b) = 1 - 1 / tokens
            self.gate_proj.bias.copy_((remembered - 1.0).log().repeat(self.gate_proj.out_features // gates))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, n, D) -> log_decay in float32, or float64 if x is float64, even under autocast."""
        dtype = compute_dtype(x)
        with autocast_off(x):
            x = x.to(dtype)
            if self.down_proj is not None:
                x = F.linear(x, weights_of(self.down_proj)[0].to(dtype))
            gate = F.linear(x, *(part.to(dtype) for part in weights_of(self.gate_proj)))
        log_decay = log_sigmoid(gate)
        if self.features is None:
            return log_decay.transpose(1, 2)
        return log_decay.unflatten(2, (self.heads, self.features)).transpose(1, 2)

    def reference(self, x: Tensor) -> Tensor:
        """Literal form of ``forward``: -log(1 + exp(-(w x + b))), one gate at a time."""
        if self.down_proj is not None:
            x = torch.stack([(x * row).sum(-1) for row in self.down_proj.weight], dim=-1)
        gates = [(x * w).sum(-1) + b for w, b in zip(self.gate_proj.weight, self.gate_proj.bias)]
        log_decay = [-torch.log(1 + torch.exp(-gate)) for gate in gates]  # (B, n) each
        if self.features is None:
            return torch.stack(log_decay, dim=1)
        heads = [torch.stack(log_decay[i : i + self.features], dim=-1) for i in range(0, len(gates), self.features)]
        return torch.stack(heads, dim=1)
