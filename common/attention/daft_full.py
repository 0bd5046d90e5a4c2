"""DAFT-full as a module: attention by key and by pair of positions, gated by the query."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.daft.full import daft_full, daft_full_in_torchscript
from ..ops.daft.full_reference import daft_full_reference
from ..ops.shared.checks import check_query_key_value, check_table
from ._daft import DaftAttention
from ._options import About, AttentionOptions, count, flag
from ._registry import register_attention


@dataclass(frozen=True)
class DaftFullOptions(AttentionOptions):
    """Options of DAFT-full; see ``common.ops.daft_full``."""

    bias_dim: int | None = count(
        128,
        "width n of the two factors of the position bias (the paper: 128, pixels 256); 0 for a free matrix, tokens x "
        "tokens, in place of two factors (Table 6)",
        optional=True,
        setup_only=True,
    )
    query: bool = flag(True, "queries gate what attention gives (Table 8 is without)", setup_only=True)


@register_attention("daft_full")
class DaftFullAttention(DaftAttention):
    """Attention by key and by pair of positions, for at most T = ``max_tokens`` tokens.

    ``daft_full`` with a learned position bias w, in O(n² H d) time. w is pe0 pe1ᵀ with pe0, pe1 (T, ``bias_dim``), or a
    free matrix (T, T) with ``bias_dim`` None or 0 (Table 6). All channels share w, so the number of heads does not
    change the result. ``query`` False drops sigmoid(q) (Table 8), and q is None. Self-attention only. Shapes and masks
    as in ``InnerAttention``; the state holds all keys and values so far.

    Raises:
        ValueError: an option that is not allowed; an input of more than ``max_tokens`` tokens.
    """

    about = About(
        "DAFT-full",
        "Zhai et al., DAFT, OpenReview 2021, equations 5 and 6",
        "n² d",
        "2n d",
        map="the mean over the channels of a head of exp(w + k) over its sum, before the gate of the query",
        url="https://openreview.net/forum?id=JVR4JswsEM",
    )
    Options = DaftFullOptions
    supports = frozenset({"causal", "bidirectional", "torchscript"})
    needs = frozenset({"max_tokens"})
    linear_cost = False
    op = staticmethod(daft_full)
    reference_op = staticmethod(daft_full_reference)

    def setup(self) -> None:
        tokens, bias_dim = self.shape.max_tokens, self.options.bias_dim
        self.max_tokens = tokens  # read by hosts
        shape = (tokens, tokens if bias_dim is None else bias_dim)
        check_table("max_tokens", tokens, shape)
        self.pe0 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.pe1 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.w = nn.Parameter(torch.empty(shape)) if bias_dim is None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise factors from N(0, 0.1), or a free w from N(0, 0.02). The paper does not specify it."""
        # Smaller factors learn slowly, since each has gradients as small as the other: 3.21 bits per character with
        # 0.02 against 3.08 after 250 updates of 2,048 characters of tinyshakespeare, 4 layers of width 128 (2026-11-21,
        # one seed).
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02 if self.options.bias_dim is None else 0.1)

    def position_bias(self) -> Tensor:
        """w (T, T): row t is added to the keys for token t."""
        if self.w is not None:
            return self.w
        assert self.pe0 is not None and self.pe1 is not None  # for TorchScript
        return self.pe0 @ self.pe1.transpose(0, 1)

    def op_kwargs(self) -> dict[str, Any]:
        """The position bias, or its factors."""
        return {"w": self.w if self.pe0 is None else (self.pe0, self.pe1)}

    def _in_torchscript(self, q: Tensor | None, k: Tensor, v: Tensor, spatial_shape: tuple[int, int] | None) -> Tensor:
        tokens = k.shape[1]
        return daft_full_in_torchscript(q, k, v, self.position_bias()[:tokens, :tokens])

    def _check(self, q: Tensor | None, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless q, k and v are (B, H, n, d)."""
        check_query_key_value(v if q is None else q, k, v, one_length=True)
        if v.shape != k.shape:
            raise ValueError(f"v has shape {tuple(v.shape)}; allowed: that of k, {tuple(k.shape)}")
