"""The base class of both kinds of DAFT: ops on merged heads (B, n, H c), with optional queries."""

from typing import Any, Final

import torch
from torch import Tensor

from ..ops.shared.attention_matrix import read_attention_matrix
from ..ops.shared.checks import check_padding_mask
from ..ops.shared.padding import zero_padding
from ..ops.shared.reference_tools import by_head, cleared, side_by_side
from ..ops.shared.state import State
from ._base import OpAttention, drop_sources


class DaftAttention(OpAttention):
    """An ``OpAttention`` whose op works on merged heads (B, n, H c), *A Dot Product Attention Free Transformer*.

    Subclasses define ``_check(q, k, v)``, for tensors (B, H, n, c), and ``_in_torchscript``.
    """

    causal: Final[bool]

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head of the queries (with the option ``query``), keys and values."""
        channels = super().projections(head_dim)
        return channels if self.options.query else {"k": channels["k"], "v": channels["v"]}

    def forward(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        spatial_shape: tuple[int, int] | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """q, v (B, H, n, d), k (B, H, n, c) -> (B, H, n, d); see ``InnerAttention``."""
        if torch.jit.is_scripting():
            masked = key_padding_mask is not None or query_padding_mask is not None
            if self.causal or masked or segment_ids is not None:
                raise ValueError("causal is True, or a mask or segment_ids are given; allowed in TorchScript: neither")
            query = None if q is None else merge_heads(q)
            values = merge_heads(drop_sources(v, dropout_p))
            return split_heads(self._in_torchscript(query, merge_heads(k), values, spatial_shape), v.shape[1])
        else:  # a separate branch, which TorchScript does not compile
            masks = key_padding_mask, query_padding_mask
            return super().forward(q, k, v, *masks, dropout_p, segment_ids, spatial_shape=spatial_shape)

    def apply_op(self, q: Tensor | None, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """Apply ``op`` to q, k and v (B, H, n, c), with their heads merged."""
        query_padding_mask = arguments.pop("query_padding_mask")
        self._check(q, k, v)
        check_padding_mask("query_padding_mask", query_padding_mask, v)
        # Zeroing the output is not enough: inf or nan in a padded query would still reach the gradients.
        query = None if q is None else merge_heads(zero_padding(q, query_padding_mask))
        out = self.apply_merged(query, merge_heads(k), merge_heads(v), **arguments)
        if not arguments.get("return_state"):
            return zero_padding(split_heads(out, v.shape[1]), query_padding_mask)
        return split_heads(out[0], v.shape[1]), out[1]

    def apply_step(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
        """``extend`` by one token of a known kind; see ``OpAttention``."""
        out, state = super().apply_step(*map(merge_heads, (q, k, v)), state)
        return split_heads(out, v.shape[1]), state

    def apply_merged(self, q: Tensor | None, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """Apply ``op`` to q, k and v (B, n, H c)."""
        return super().apply_op(q, k, v, **arguments)

    def apply_reference(self, q: Tensor | None, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        """Apply ``reference_op`` to q, k and v (B, H, n, c)."""
        query_padding_mask = arguments.pop("query_padding_mask")
        tensors = [None if x is None else side_by_side(x) for x in (q, k, v)]
        out = super().apply_reference(*tensors, **arguments)
        return cleared(by_head(out, v.shape[1]), query_padding_mask)

    def attention_matrix(
        self,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """exp(w + k) over its sum, (B, H, n, n), before the query's gate; the mean over channels with separate keys.

        Where a head has one key for each token, map @ v is ``forward`` before the gate.
        """
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        inputs = {**self._needed(inputs), **self.packing(segment_ids)}
        kinds = [k] if k.shape[-1] == 1 else [key.expand_as(k) for key in k.split(1, dim=-1)]  # one channel each
        maps = [
            read_attention_matrix(lambda values, k=kind: self._weighed(k, values, masks, inputs), v) for kind in kinds
        ]
        return torch.stack(maps).mean(0)

    def _weighed(self, k: Tensor, v: Tensor, masks: dict[str, Tensor | None], inputs: dict[str, Any]) -> Tensor:
        """Apply ``apply_op`` without queries."""
        return self.apply_op(None, k, v, **masks, **inputs)

    def recorded_keys(self, k: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Keys that ``record_keys`` records: a copy of k (B, H, n, c), the same with and without ``segment_ids``."""
        return k.clone()


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, n, c) -> (B, n, H c)."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, H c) -> (B, H, n, c)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
