"""Output norm and output gate of recent linear attention: each head's output is normalised, then gated by the token.

Legend: B batch, H heads, n tokens, d channels of a head, e channels of its value, D = H d width.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.shared.checks import check_tokens
from ..ops.shared.gpu.launch import several_on_gpu
from ..ops.shared.padding import zero_padded_tokens, zero_padding
from ..ops.shared.precision import compute_dtype, in_dtype
from ..ops.shared.reference_tools import by_head, cleared
from ..ops.shared.state import State
from ._base import OpAttention
from ._options import choice

OUTPUT_NORMS = ("none", "rms", "group")
OUTPUT_GATES = ("none", "swish", "sigmoid")
#: Added under the root of the norms, as in torch's norms and in the authors' code.
_EPS = 1e-5


def output_norm(default: str) -> Any:
    """The field ``output_norm`` of a mechanism that is an ``OutputGateAttention``."""
    help = "norm of each head's output: rms, its root mean square; group, mean and variance; none"
    return choice(default, OUTPUT_NORMS, help, setup_only=True)


def output_gate(default: str) -> Any:
    """The field ``output_gate`` of a mechanism that is an ``OutputGateAttention``."""
    help = "gate on each head's output from the tokens before their projection: swish; sigmoid; none"
    return choice(default, OUTPUT_GATES, help, setup_only=True)


class OutputGateAttention(OpAttention):
    """An ``OpAttention`` on tokens x (B, n, D) whose output o_i (B, H, n, e) becomes norm(o_i) ⊙ swish(W x_i).

    swish(z) = z sigmoid(z), as in RetNet (Sun et al., 2023, equation 8) and later papers; or sigmoid(W x_i), as in Kimi
    Linear (2025). With ``output_gate_rank`` W is a product of two matrices of that rank. The norm is computed per
    head, with a weight (for "group" also a bias) per channel: "rms", o / rms(o), or "group", (o - mean) / std. Norm and
    gate are both optional. A padded query gives 0. For inputs in half precision, ``op`` computes in float32, because
    outputs without a normaliser may exceed the range of float16. Costs O(n D H e) more time.

    A subclass has the options ``output_norm`` and ``output_gate``, needs "num_heads", "head_dim" and "x", and calls
    ``build_output`` in ``setup``. It sets ``op_takes_x`` if ``op`` itself has an argument x, and ``gate_bias`` if the
    paper's gate has a bias. If neither op nor gate uses x, the module does not need it.
    """

    needs = frozenset({"num_heads", "head_dim", "x"})
    #: Whether ``op`` and ``reference_op`` have an argument x.
    op_takes_x: ClassVar[bool] = True
    #: Whether the gate is swish(W x + b).
    gate_bias: ClassVar[bool] = False

    def output_gate_rank(self) -> int | None:
        """The rank of W; None if it is one matrix."""
        return None

    def build_output(self) -> None:
        """Build the parameters of norm and gate that ``self.options`` asks for."""
        heads, options = self.shape.num_heads, self.options
        channels, width = self.projections(self.shape.head_dim)["v"], heads * self.shape.head_dim
        normed, centred = options.output_norm != "none", options.output_norm == "group"
        self.output_norm_weight = nn.Parameter(torch.ones(heads, channels)) if normed else None
        self.output_norm_bias = nn.Parameter(torch.zeros(heads, channels)) if centred else None
        gated = options.output_gate != "none"
        rank = self.output_gate_rank() if gated else None
        self.output_gate_down_proj = None if rank is None else nn.Linear(width, rank, bias=False)
        self.output_gate_proj = nn.Linear(rank or width, heads * channels, bias=self.gate_bias) if gated else None
        if not (gated or self.op_takes_x):
            self.needs = self.needs - {"x"}

    def reset_output(self) -> None:
        """Initialise the parameters of norm and gate."""
        if self.output_norm_weight is not None:
            nn.init.ones_(self.output_norm_weight)
        if self.output_norm_bias is not None:
            nn.init.zeros_(self.output_norm_bias)
        for proj in (self.output_gate_down_proj, self.output_gate_proj):
            if proj is not None:
                proj.reset_parameters()

    def apply_op(self, *tensors: Tensor, x: Tensor | None = None, **arguments: Any) -> Any:
        """Apply ``op``, then norm and gate."""
        widened = _widened(tensors) if self._finishes() else tensors
        result = self.operate(*widened, **self._x_of_op(x), **arguments)  # checks everything except x
        out, *state = result if arguments.get("return_state") else (result,)
        out = self.finished(out, x, arguments["query_padding_mask"]).to(tensors[-1].dtype)
        return (out, *state) if state else out

    def apply_step(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, *, x: Tensor | None = None, **inputs: Tensor
    ) -> tuple[Tensor, State]:
        """``extend`` by one token of a known kind; see ``OpAttention``."""
        out, state = self.operate_step(q, k, v, state, **self._x_of_op(x), **inputs)
        return self.finished(out, x), state

    def operate_step(self, *tensors: Any, **inputs: Tensor) -> tuple[Tensor, State]:
        """``apply_step`` without norm and gate; a subclass adds steps before ``step`` here."""
        return super().apply_step(*tensors, **inputs)

    def operate(self, *tensors: Tensor, **arguments: Any) -> Any:
        """Apply ``op`` without norm and gate; a subclass adds steps before ``op`` here."""
        return super().apply_op(*tensors, **arguments)

    def operate_literally(self, *tensors: Tensor, **arguments: Any) -> Tensor:
        """Apply ``reference_op`` without norm and gate; a subclass adds the literal steps before it here."""
        return super().apply_reference(*tensors, **arguments)

    def finished(self, out: Tensor, x: Tensor | None, padding_mask: Tensor | None = None) -> Tensor:
        """Apply norm and gate to ``out`` (B, H, n, e), with x (B, n, D); 0 where ``padding_mask`` (B, n) is True."""
        if not self._finishes():
            return out
        out, proj = self._normalised(in_dtype(out, compute_dtype(out))), self.output_gate_proj
        if proj is not None:
            projs = [x for x in (self.output_gate_down_proj, proj) if x is not None]
            check_tokens(x, out, projs[0].in_features)
            # Padding must not reach the gate's gradients.
            gate = zero_padded_tokens(x, padding_mask)
            for proj in projs:
                weight = proj.weight  # a method after quantisation; any dtype of x is then accepted
                gate = proj(in_dtype(gate, weight.dtype) if isinstance(weight, Tensor) else gate)  # at last (B, n, H e)
            gate = in_dtype(gate, compute_dtype(gate))
            gate = F.silu(gate) if self.options.output_gate == "swish" else torch.sigmoid(gate)
            if gate.shape[1] == 1:
                out = out * gate.view(out.shape)
            else:
                out = out * gate.unflatten(2, (out.shape[1], -1)).transpose(1, 2)
        return zero_padding(out, padding_mask)

    def _normalised(self, out: Tensor) -> Tensor:
        weight, bias = self.output_norm_weight, self.output_norm_bias
        if weight is None:
            return out
        weight = in_dtype(weight, out.dtype).unsqueeze(1)  # (H, 1, e)
        if bias is None:
            return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + _EPS) * weight
        return torch.addcmul(
            in_dtype(bias, out.dtype).unsqueeze(1), F.layer_norm(out, out.shape[-1:], eps=_EPS), weight
        )

    def apply_reference(self, *tensors: Tensor, x: Tensor | None = None, **arguments: Any) -> Tensor:
        """Apply ``reference_op``, then norm and gate of each head, literally."""
        out = self.operate_literally(*tensors, **self._x_of_op(x), **arguments)
        heads = list(out.unbind(1))  # (B, n, e) each
        for h, head in enumerate(heads):
            if self.options.output_norm == "rms":
                rms = ((head**2).mean(-1, keepdim=True) + 1e-5) ** 0.5
                heads[h] = head / rms * self.output_norm_weight[h]
            if self.options.output_norm == "group":
                variance = head.var(-1, unbiased=False, keepdim=True)
                standard = (head - head.mean(-1, keepdim=True)) / (variance + 1e-5) ** 0.5
                heads[h] = standard * self.output_norm_weight[h] + self.output_norm_bias[h]
        out = torch.stack(heads, dim=1)
        if self.options.output_gate != "none":
            low = self.output_gate_down_proj
            z = x if low is None else torch.einsum("bnd,rd->bnr", x, low.weight)
            z = torch.einsum("bnd,cd->bnc", z, self.output_gate_proj.weight)
            z = z if self.output_gate_proj.bias is None else z + self.output_gate_proj.bias
            out = out * by_head((z if self.options.output_gate == "swish" else 1) / (1 + torch.exp(-z)), out.shape[1])
        return cleared(out, arguments["query_padding_mask"])

    def linear_op(self, *tensors: Tensor, x: Tensor | None = None, **arguments: Any) -> Tensor:
        """Apply ``op`` without norm and gate: ``finished(map @ v, x)`` is ``forward``."""
        return self.operate(*tensors, **self._x_of_op(x), **arguments)

    def _finishes(self) -> bool:
        """Whether there is a norm or a gate."""
        return self.output_norm_weight is not None or self.output_gate_proj is not None

    def _x_of_op(self, x: Tensor | None) -> dict[str, Tensor | None]:
        return {"x": x} if self.op_takes_x else {}


def _widened(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert tensors of one half-precision dtype to float32; return others unchanged, since ``op`` checks them.

    fla's kernels get bfloat16, which has the range of float32.
    """
    dtypes = {getattr(x, "dtype", None) for x in tensors}
    if dtypes == {torch.bfloat16} and several_on_gpu(tensors[0]):
        from ..ops.shared.gpu import fla  # not above: CPUs do not need it

        if fla.is_usable():
            return tensors
    return tuple(x.float() for x in tensors) if dtypes in ({torch.float16}, {torch.bfloat16}) else tensors
