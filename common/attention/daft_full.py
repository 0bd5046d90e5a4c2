"""DAFT-full as a module: attention by key and by pair of positions, gated by the query."""

from typing import Final, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from ..ops.checks import State, check_positive_int, check_query_key_value
from ..ops.chunks import zero_padding
from ..ops.daft_full import daft_full, daft_full_scriptable
from .base import drop_sources
from .daft import DaftAttention, merge_heads, split_heads


class DaftFullAttention(DaftAttention):
    """``daft_full`` with a learned position bias w for at most T = ``max_tokens`` tokens (Eq. 5, 6), O(n² H d) time.

    w is pe0 pe1ᵀ with pe0, pe1 (T, ``bias_dim``), or a free matrix (T, T) with ``bias_dim`` None (Table 6); one for all
    channels, so heads are without meaning here: any split of the width gives the same. ``query`` False leaves
    sigmoid(q) out (Table 8), and q is None. Self-attention only. Shapes and masks as in ``InnerAttention``; the state
    is every key and value so far.

    Raises:
        ValueError: a count below 1; an input of more than ``max_tokens`` tokens.
    """

    causal: Final[bool]
    state_is_constant_size = False

    def __init__(
        self, causal: bool = False, *, max_tokens: int, bias_dim: Optional[int] = 128, query: bool = True
    ) -> None:
        super().__init__(causal)
        check_positive_int("max_tokens", max_tokens)
        if bias_dim is not None:
            check_positive_int("bias_dim", bias_dim)
        self.max_tokens, self.bias_dim, self.query = max_tokens, bias_dim, query
        shape = (max_tokens, max_tokens if bias_dim is None else bias_dim)
        self.pe0 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.pe1 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.w = nn.Parameter(torch.empty(shape)) if bias_dim is None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors from N(0, 0.1), a free w from N(0, 0.02). The paper does not say."""
        # Smaller factors learn slowly, each waiting for the other: 3.21 bits per character with 0.02 against 3.08 after
        # 250 updates of 2,048 characters of tinyshakespeare, 4 layers of width 128 (2026-11-21, one seed).
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1 if self.bias_dim is not None else 0.02)

    def position_bias(self) -> Tensor:
        """w (T, T): row t is added to the keys that token t sees."""
        if self.w is not None:
            return self.w
        assert self.pe0 is not None and self.pe1 is not None  # for TorchScript
        return self.pe0 @ self.pe1.transpose(0, 1)

    def forward(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
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
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor],
        query_padding_mask: Optional[Tensor],
    ) -> Tensor:
        heads = v.shape[1]
        q, k, v = self._merged(q, k, v, "query_padding_mask", query_padding_mask)
        out = daft_full(q, k, v, self._bias(), causal=self.causal, key_padding_mask=key_padding_mask)
        return zero_padding(split_heads(out, heads), query_padding_mask)

    @torch.jit.unused
    def _op(self, q: Optional[Tensor], k: Tensor, v: Tensor, **options) -> Tuple[Tensor, State]:
        return daft_full(q, k, v, self._bias(), causal=True, **options)

    @torch.jit.unused
    def _check(self, q: Optional[Tensor], k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless all are (B, H, n, d)."""
        check_query_key_value(v if q is None else q, k, v, one_length=True)
        if v.shape != k.shape:
            raise ValueError(f"v has shape {tuple(v.shape)}; allowed: that of k, {tuple(k.shape)}")

    @torch.jit.unused
    def _bias(self) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        return self.w if self.pe0 is None else (self.pe0, self.pe1)
