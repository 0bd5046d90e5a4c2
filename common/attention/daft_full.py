"""DAFT-full as a module: attention by key and by pair of positions, gated by the query."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from ..ops.daft.full import daft_full, daft_full_scriptable
from ..ops.daft.full_reference import daft_full_reference
from ..ops.shared.checks import check_query_key_value
from ..ops.shared.padding import zero_padding
from ..ops.shared.reference_tools import by_head, cleared, side_by_side
from ..ops.shared.state import State, state_entry
from ._base import drop_sources
from ._daft import DaftAttention, merge_heads, split_heads
from ._options import AttentionOptions, count, flag
from ._registry import register_attention


@dataclass(frozen=True)
class DaftFullOptions(AttentionOptions):
    """Options of DAFT-full; see ``common.ops.daft_full``."""

    bias_dim: int | None = count(
        128,
        "width n of the two factors of the position bias (the paper: 128, pixels 256); 0 for a free matrix, tokens x "
        "tokens, in place of two factors (Table 6)",
        optional=True,
    )
    query: bool = flag(True, "queries gate what attention gives (Table 8 is without)")


@register_attention("daft_full")
class DaftFullAttention(DaftAttention):
    """``daft_full`` with a learned position bias w for at most T = ``max_tokens`` tokens (Eq. 5, 6), O(n² H d) time.

    w is pe0 pe1ᵀ with pe0, pe1 (T, ``bias_dim``), or a free matrix (T, T) with ``bias_dim`` None or 0 (Table 6). It is
    one for all channels, so that heads have no meaning here: any split of the width gives the same. ``query`` False
    leaves sigmoid(q) out (Table 8), and q is None. Self-attention only. Shapes and masks as in ``InnerAttention``; the
    state is every key and value so far.

    Raises:
        ValueError: an option that is not allowed; an input of more than ``max_tokens`` tokens.
    """

    Options = DaftFullOptions
    supports = frozenset({"causal", "bidirectional", "images"})
    needs = frozenset({"max_tokens"})
    state_is_constant_size = False
    causal: Final[bool]

    def setup(self) -> None:
        tokens, bias_dim = self.shape.max_tokens, self.options.bias_dim
        self.max_tokens = tokens
        shape = (tokens, tokens if bias_dim is None else bias_dim)
        self.pe0 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.pe1 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.w = nn.Parameter(torch.empty(shape)) if bias_dim is None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors from N(0, 0.1), a free w from N(0, 0.02). The paper does not say."""
        # Smaller factors learn slowly, each waiting for the other: 3.21 bits per character with 0.02 against 3.08 after
        # 250 updates of 2,048 characters of tinyshakespeare, 4 layers of width 128 (2026-11-21, one seed).
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02 if self.options.bias_dim is None else 0.1)

    def position_bias(self) -> Tensor:
        """w (T, T): row t is added to the keys that token t sees."""
        if self.w is not None:
            return self.w
        assert self.pe0 is not None and self.pe1 is not None  # for TorchScript
        return self.pe0 @ self.pe1.transpose(0, 1)

    def forward(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q, k, v (B, H, n, d) -> (B, H, n, d); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if self.causal or key_padding_mask is not None or query_padding_mask is not None:
                raise ValueError("causal is True or a mask is given; allowed in TorchScript: neither")
            tokens = k.shape[2]
            w = self.position_bias()[:tokens, :tokens]
            out = daft_full_scriptable(None if q is None else merge_heads(q), merge_heads(k), merge_heads(v), w)
            return split_heads(out, v.shape[1])
        return self._attend(q, k, v, key_padding_mask, query_padding_mask)

    @torch.jit.unused
    def _attend(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
    ) -> Tensor:
        merged = self._merged(q, k, v, "query_padding_mask", query_padding_mask)
        out = daft_full(*merged, self._bias(), causal=self.causal, key_padding_mask=key_padding_mask)
        return zero_padding(split_heads(out, v.shape[1]), query_padding_mask)

    @torch.jit.unused
    def reference(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The literal formula, slowly; shapes and masks as in ``forward``."""
        query = None if q is None else side_by_side(q)
        w = self.w if self.w is not None else (self.pe0, self.pe1)
        options = {"causal": self.causal, "key_padding_mask": key_padding_mask}
        out = daft_full_reference(query, side_by_side(k), side_by_side(v), w, **options)
        return cleared(by_head(out, v.shape[1]), query_padding_mask)

    @torch.jit.unused
    def _op(self, q: Tensor | None, k: Tensor, v: Tensor, **options) -> tuple[Tensor, State]:
        state = options["initial_state"]
        if state is not None:
            self._check_tokens(k.shape[1] + state_entry(state, "padding_mask", 2, k).shape[1])
        return daft_full(q, k, v, self._bias(), causal=True, **options)

    @torch.jit.unused
    def _check(self, q: Tensor | None, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless all are (B, H, n, d)."""
        check_query_key_value(v if q is None else q, k, v, one_length=True)
        if v.shape != k.shape:
            raise ValueError(f"v has shape {tuple(v.shape)}; allowed: that of k, {tuple(k.shape)}")
        self._check_tokens(k.shape[2])

    @torch.jit.unused
    def _check_tokens(self, tokens: int) -> None:
        """Raise ValueError for more tokens than there are position biases."""
        if tokens > self.max_tokens:
            raise ValueError(f"the input has {tokens} tokens; allowed: at most max_tokens={self.max_tokens}")

    @torch.jit.unused
    def _bias(self) -> Tensor | tuple[Tensor, Tensor]:
        return self.w if self.pe0 is None else (self.pe0, self.pe1)
