"""The gated delta rule as a module."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules.linear_weights import weights_of
from ..ops.gated_delta import ACTIVATIONS, QK_NORMS, gated_delta_attention
from ..ops.gated_delta.reference import gated_delta_attention_reference
from ..ops.shared.checks import check_padding_mask, check_query_key_value, check_tokens
from ..ops.shared.padding import zero_padded_tokens
from ..ops.shared.precision import autocast_off, compute_dtype, in_dtype
from ..ops.shared.state import State
from ._options import About, AttentionOptions, causal_chunk_size, choice, default_of, flag
from ._output_gate import OutputGateAttention, output_gate, output_norm
from ._registry import register_attention

#: Sources of the memory's decay.
GATES = ("data", "none")
#: Initial rates are uniform up to the first, and initial steps log-uniform in the second, as in the authors' layer.
_MOST_RATE, _STEPS = 16.0, (0.001, 0.1)


@torch.no_grad()
def draw_decay(A_log: Tensor, dt_bias: Tensor) -> None:
    """Draw initial values of the parameters of a decay."""
    rate = _MOST_RATE * (1 - torch.rand_like(A_log))  # never 0, whose logarithm is -inf
    A_log.copy_(rate.log())
    least, most = map(math.log, _STEPS)
    step = torch.empty_like(dt_bias).uniform_(least, most).exp()
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse softplus of the step


@dataclass(frozen=True)
class GatedDeltaOptions(AttentionOptions):
    """Options of the gated delta rule; see ``common.ops.gated_delta_attention``."""

    gate: str = choice("data", GATES, "what the memory decays by: data, each token; none, DeltaNet", setup_only=True)
    negative_eigenvalues: bool = flag(False, "beta from 0 to 2 in place of 1", setup_only=True)
    qk_activation: str = choice(
        default_of(gated_delta_attention, "qk_activation"), ACTIVATIONS, "what queries and keys go through first"
    )
    qk_norm: str = choice(default_of(gated_delta_attention, "qk_norm"), QK_NORMS, "norm that queries and keys have")
    v_activation: str = choice(
        default_of(gated_delta_attention, "v_activation"), ACTIVATIONS, "what values go through first"
    )
    output_norm: str = output_norm("rms")
    output_gate: str = output_gate("swish")
    chunk_size: int = causal_chunk_size(gated_delta_attention)


@register_attention("gated_delta")
class GatedDeltaAttention(OutputGateAttention):
    """A memory that decays, and from which a key's old value is erased before its new one is written.

    Gated DeltaNet, and DeltaNet with ``gate="none"``. From the tokens x (B, n, D) before their projection, for each
    head: β = sigmoid(w_b·x), twice that with ``negative_eigenvalues``, and log α = -exp(A_log) softplus(w_a·x +
    dt_bias), as in Mamba2. Initially exp(A_log) is uniform in (0, 16] and softplus(dt_bias) log-uniform in 0.001 ...
    0.1, as in the authors' layer (fla/layers/gated_deltanet.py of flash-linear-attention, 2026-08); Mamba2 starts from
    1 to 16. Each head's output goes through an RMS norm and a swish gate of the token. The papers' layers have a short
    convolution before all this: use ``short_conv=4``. x (B, n, D); other shapes and masks as in ``InnerAttention``,
    options as in ``common.ops.gated_delta_attention`` and ``OutputGateAttention``.
    """

    about = About(
        "Gated DeltaNet and DeltaNet",
        "Yang et al., ICLR 2025; NeurIPS 2024",
        "n (C + d) d",
        "d²",
        sizes={"C": "chunk_size"},
        url="https://arxiv.org/abs/2412.06464",
    )
    Options = GatedDeltaOptions
    supports = frozenset({"causal"})
    op = staticmethod(gated_delta_attention)
    reference_op = staticmethod(gated_delta_attention_reference)

    def setup(self) -> None:
        heads = self.shape.num_heads
        width = heads * self.shape.head_dim
        self.beta_proj = nn.Linear(width, heads, bias=False)
        if self.options.gate == "data":
            self.decay_proj = nn.Linear(width, heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(heads))
            draw_decay(self.A_log, self.dt_bias)
        self.build_output()

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        self.beta_proj.reset_parameters()
        self.reset_output()
        if self.options.gate == "data":
            self.decay_proj.reset_parameters()
            draw_decay(self.A_log, self.dt_bias)

    def operate(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, **arguments: Any) -> Any:
        """Apply ``op`` with beta and the decay, which depend on x (B, n, D)."""
        gates = self._gates(q, k, v, x, arguments["key_padding_mask"])
        return type(self).op(q, k, v, **{**self._arguments, **gates, **arguments})

    def operate_step(self, q: Tensor, k: Tensor, v: Tensor, state: State, *, x: Tensor) -> tuple[Tensor, State]:
        """Apply ``op.step`` with beta and the decay of one token."""
        return type(self).op.step(q, k, v, state, **self._gates_of(x), **self._arguments)

    def linear_op(self, *tensors: Tensor, **arguments: Any) -> Tensor:
        """Apply ``op`` to values after their activation."""
        return super().linear_op(*tensors, **arguments, v_activation="none")

    def _gates(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, key_padding_mask: Tensor | None) -> dict[str, Tensor]:
        """beta and, with a gate, log_decay from x (B, n, D): (B, H, n) each."""
        check_query_key_value(q, k, v, one_length=True)
        check_padding_mask("key_padding_mask", key_padding_mask, k)
        check_tokens(x, q, self.beta_proj.in_features)
        # In float32 or float64 even under autocast: errors of a decay accumulate over many tokens.
        x = zero_padded_tokens(x.to(compute_dtype(q)), key_padding_mask)  # padding must not reach the gradients
        with autocast_off(q):
            return self._gates_of(x)

    def _gates_of(self, x: Tensor) -> dict[str, Tensor]:
        """``_gates`` of x (B, n, D), 0 at padding, in the dtype of the gates."""
        dtype = x.dtype
        gates = {"beta": self._scaled(torch.sigmoid(F.linear(x, in_dtype(weights_of(self.beta_proj)[0], dtype))))}
        if self.options.gate == "data":
            weight, bias = in_dtype(weights_of(self.decay_proj)[0], dtype), in_dtype(self.dt_bias, dtype)
            step = F.linear(x, weight, bias)  # (B, n, H)
            gates["log_decay"] = in_dtype(self.A_log, dtype).exp() * F.logsigmoid(-step)  # -softplus(step)
        return {name: gate.transpose(1, 2) for name, gate in gates.items()}

    def operate_literally(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, **arguments: Any) -> Tensor:
        """Apply ``reference_op`` with the same gates, computed literally."""

        def per_head(weight: Tensor) -> Tensor:
            return torch.stack([(x * row).sum(-1) for row in weight], dim=1)  # (B, H, n)

        gates = {"beta": self._scaled(1 / (1 + torch.exp(-per_head(self.beta_proj.weight))))}
        if self.options.gate == "data":
            step = torch.log(1 + torch.exp(per_head(self.decay_proj.weight) + self.dt_bias[:, None]))
            gates["log_decay"] = -torch.exp(self.A_log)[:, None] * step
        return super().operate_literally(q, k, v, **gates, **arguments)

    def _scaled(self, beta: Tensor) -> Tensor:
        return 2 * beta if self.options.negative_eigenvalues else beta
