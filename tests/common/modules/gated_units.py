"""Gated attention units, FLASH and FLASH-Quad, as mechanisms for the contract tests. No host registers them.

The tokens of a unit are the values with heads joined, and its output is split into heads again.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.attention import AttentionOptions, InnerAttention, choice, flag, register_attention
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from common.ops.quadratic.reference import gau_attention_reference
from common.ops.shared.reference_tools import cleared, rotated
from common.ops.shared.score_kernels import SCORE_KERNELS


@dataclass(frozen=True)
class UnitOptions(AttentionOptions):
    """Options of ``GatedAttentionUnit``, each of which changes its output."""

    kernel: str = choice("relu2", SCORE_KERNELS, "what turns scores into weights")
    gate: bool = flag(True, "multiply by U")


@dataclass(frozen=True)
class FlashOptions(UnitOptions):
    """``UnitOptions``, and the terms of mixed chunk attention."""

    local: bool = flag(True, "attention inside chunks")
    linear: bool = flag(True, "linear attention across chunks")


@register_attention("unit_flash")
class FlashUnit(InnerAttention):
    """A unit with chunks of five tokens and two heads of its own; O(n)."""

    Options = FlashOptions
    needs = frozenset({"num_heads", "head_dim", "max_tokens"})
    chunk_size: int | None = 5

    def setup(self) -> None:
        width, longest = self.shape.num_heads * self.shape.head_dim, self.shape.max_tokens
        lengths = {"chunk_size": self.chunk_size, "max_positions": None if self.chunk_size else longest}
        sizes = {"expanded_dim": 6, "query_dim": 4, "heads": 2, "causal": self.causal, **lengths}
        self.unit = GatedAttentionUnit(width, **sizes, **self.options.as_dict())

    def projections(self, head_dim: int) -> dict[str, int]:
        """The widths of projections: values only."""
        return {"v": head_dim}

    def state_tokens(self) -> int | None:
        """The number of tokens that the unit's state holds."""
        return self.unit.state_tokens()

    def forward(self, q, k, v, key_padding_mask=None, query_padding_mask=None, dropout_p=0.0) -> Tensor:
        """Attend among the tokens v."""
        return self.split(self.unit(self.joined(v, dropout_p), key_padding_mask), query_padding_mask)

    def extend(self, q, k, v, padding_mask=None, state=None, dropout_p=0.0):
        """Attend from the next tokens v to all tokens so far."""
        out, state = self.unit.extend(self.joined(v, dropout_p), padding_mask, state)
        return self.split(out, padding_mask), state

    def reference(self, q, k, v, key_padding_mask=None, query_padding_mask=None) -> Tensor:
        """Section 2 of FLASH with every matrix written out."""
        unit, x, mask = self.unit, self.joined(v), key_padding_mask
        normal = F.layer_norm(x, x.shape[-1:], unit.norm.weight, unit.norm.bias)
        hidden = F.silu(normal @ unit.in_proj.weight.T + unit.in_proj.bias)
        u, values, z = hidden.split([6, 6, 4], -1) if unit.gate else (1.0, *hidden.split([6, 4], -1))
        values = torch.stack(values.split(3, -1), 1)  # (B, 2, n, 3)
        copies = [
            rotated(z[:, None] * gamma[:, None] + beta[:, None], mask) for gamma, beta in zip(unit.gamma, unit.beta)
        ]
        options = {"causal": unit.causal, "kernel": unit.kernel, "key_padding_mask": mask}
        if unit.chunk_size is None:
            bias = unit.bias.weight[:, unit.max_positions - x.shape[1] : unit.max_positions + x.shape[1] - 1]
            out = gau_attention_reference(*copies, values, bias=bias, divisor=unit.divisor, **options)
        else:
            nothing = [torch.full_like(copies[0], math.nan)] * (4 - len(copies))  # for a term that is omitted
            copies = copies + nothing if unit.local else nothing + copies
            options |= {"local": unit.local, "linear": unit.linear, "bias": unit.bias.weight if unit.local else None}
            out = mixed_chunk_attention_reference(*copies, values, chunk_size=5, **options)
        out = u * torch.cat(out.unbind(1), -1)
        return cleared(self.split(x + out @ unit.out_proj.weight.T + unit.out_proj.bias), query_padding_mask)

    def joined(self, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        """(B, H, n, d) -> (B, n, H d), after dropout."""
        return F.dropout(v, dropout_p).transpose(1, 2).flatten(2)

    def split(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, H d) -> (B, H, n, d), 0 at padding."""
        out = x.unflatten(2, (self.shape.num_heads, -1)).transpose(1, 2)
        return out if mask is None else out.masked_fill(mask[:, None, :, None], 0.0)


@register_attention("unit_quad")
class QuadUnit(FlashUnit):
    """A unit with quadratic attention."""

    Options = UnitOptions
    chunk_size = None
    linear_cost = False
