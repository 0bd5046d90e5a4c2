"""Kimi Delta Attention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules.linear_weights import weights_of
from ..ops.gated_delta import ACTIVATIONS, QK_NORMS
from ..ops.kimi_delta import kimi_delta_attention
from ..ops.kimi_delta.reference import kimi_delta_attention_reference
from ..ops.shared.checks import check_padding_mask, check_query_key_value, check_tokens
from ..ops.shared.log_sigmoid import log_sigmoid
from ..ops.shared.padding import zero_padded_tokens
from ..ops.shared.precision import autocast_off, compute_dtype, in_dtype
from ..ops.shared.reference_tools import by_head
from ..ops.shared.state import State
from ._options import About, AttentionOptions, causal_chunk_size, choice, count, default_of
from ._output_gate import OutputGateAttention, output_gate, output_norm
from ._registry import register_attention
from .gated_delta import draw_decay


@dataclass(frozen=True)
class KimiDeltaOptions(AttentionOptions):
    """Options of Kimi Delta Attention; see ``common.ops.kimi_delta_attention``."""

    gate_rank: int | None = count(
        None,
        "rank of the projections from tokens to decay and output gate; by default the channels of a head",
        optional=True,
        setup_only=True,
    )
    qk_activation: str = choice(
        default_of(kimi_delta_attention, "qk_activation"), ACTIVATIONS, "what queries and keys go through first"
    )
    qk_norm: str = choice(default_of(kimi_delta_attention, "qk_norm"), QK_NORMS, "norm that queries and keys have")
    v_activation: str = choice(
        default_of(kimi_delta_attention, "v_activation"), ACTIVATIONS, "what values go through first"
    )
    output_norm: str = output_norm("rms")
    output_gate: str = output_gate("sigmoid")
    chunk_size: int = causal_chunk_size(kimi_delta_attention)


@register_attention("kimi_delta")
class KimiDeltaAttention(OutputGateAttention):
    """A memory whose channels decay by themselves, and from which a key's old value is erased before its new one.

    Kimi Linear, section 4 and equation 10. From the tokens x (B, n, D) before their projection, for each head: β =
    sigmoid(w_b·x), and for each channel of its keys log α = -exp(A_log) softplus(W₂ W₁ x + dt_bias), the decay of Gated
    DeltaNet, which also has its initial values. Each head's output goes through an RMS norm and a gate sigmoid(W₄ W₃ x)
    of the token. The paper's layer has a short convolution before all this: use ``short_conv=4``. x (B, n, D); other
    shapes and masks as in ``InnerAttention``, options as in ``common.ops.kimi_delta_attention`` and
    ``OutputGateAttention``.
    """

    about = About(
        "Kimi Delta Attention",
        "Kimi Team, 2025, equations 1 and 10",
        "n (C + d) d",
        "d²",
        sizes={"C": "chunk_size"},
        url="https://arxiv.org/abs/2510.26692",
    )
    Options = KimiDeltaOptions
    supports = frozenset({"causal"})
    op = staticmethod(kimi_delta_attention)
    reference_op = staticmethod(kimi_delta_attention_reference)

    def setup(self) -> None:
        heads, channels = self.shape.num_heads, self.shape.head_dim
        self.beta_proj = nn.Linear(heads * channels, heads, bias=False)
        self.decay_down_proj = nn.Linear(heads * channels, self.output_gate_rank(), bias=False)
        self.decay_up_proj = nn.Linear(self.output_gate_rank(), heads * channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels))
        draw_decay(self.A_log, self.dt_bias)
        self.build_output()

    def output_gate_rank(self) -> int:
        """The rank of both gates."""
        return self.options.gate_rank or self.shape.head_dim

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        for proj in (self.beta_proj, self.decay_down_proj, self.decay_up_proj):
            proj.reset_parameters()
        draw_decay(self.A_log, self.dt_bias)
        self.reset_output()

    def operate(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, **arguments: Any) -> Any:
        """Apply ``op`` with beta and the decay, which depend on x (B, n, D)."""
        gates = self._gates(q, k, v, x, arguments["key_padding_mask"])
        return type(self).op(q, k, v, **{**self._arguments, **gates, **arguments})

    def operate_step(self, q: Tensor, k: Tensor, v: Tensor, state: State, *, x: Tensor) -> tuple[Tensor, State]:
        """Apply ``op.step`` with beta and the decay of one token."""
        return type(self).op.step(q, k, v, state, **self._gates_of(x, q.shape[3]), **self._arguments)

    def linear_op(self, *tensors: Tensor, **arguments: Any) -> Tensor:
        """Apply ``op`` to values after their activation."""
        return super().linear_op(*tensors, **arguments, v_activation="none")

    def _gates(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, key_padding_mask: Tensor | None) -> dict[str, Tensor]:
        """beta (B, H, n) and log_decay (B, H, n, d) from x (B, n, D)."""
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        check_tokens(x, q, self.beta_proj.in_features)
        # In float32 or float64 even under autocast: errors of a decay accumulate over many tokens.
        x = zero_padded_tokens(x.to(compute_dtype(q)), key_padding_mask)  # padding must not reach the gradients
        with autocast_off(q):
            return self._gates_of(x, q.shape[3])

    def _gates_of(self, x: Tensor, channels: int) -> dict[str, Tensor]:
        """``_gates`` of x (B, n, D), 0 at padding, in the dtype of the gates, for keys of so many ``channels``."""
        projs = self.beta_proj, self.decay_down_proj, self.decay_up_proj
        beta, down, up = (in_dtype(weights_of(proj)[0], x.dtype) for proj in projs)
        step = F.linear(F.linear(x, down), up, in_dtype(self.dt_bias, x.dtype)).unflatten(2, (-1, channels))
        log_decay = in_dtype(self.A_log, x.dtype).exp()[:, None] * log_sigmoid(-step)  # -softplus(step)
        beta = torch.sigmoid(F.linear(x, beta))
        return {"beta": beta.transpose(1, 2), "log_decay": log_decay.transpose(1, 2)}

    def operate_literally(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, **arguments: Any) -> Tensor:
        """Apply ``reference_op`` with the same gates, computed literally."""
        down, up = self.decay_down_proj.weight, self.decay_up_proj.weight
        step = torch.log(1 + torch.exp(torch.einsum("bnd,rd,cr->bnc", x, down, up) + self.dt_bias))
        beta = 1 / (1 + torch.exp(-torch.einsum("bnd,hd->bhn", x, self.beta_proj.weight)))
        log_decay = -torch.exp(self.A_log)[:, None, None] * by_head(step, q.shape[1])
        return super().operate_literally(q, k, v, beta=beta, log_decay=log_decay, **arguments)
