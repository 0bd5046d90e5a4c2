"""Softmax attention as a module: torch's fused kernel, the baseline of all comparisons."""

from torch import Tensor

from ..ops.shared.state import State
from ..ops.softmax import softmax_attention
from ..ops.softmax.reference import softmax_attention_reference
from ._base import OpAttention
from ._options import About
from ._registry import register_attention


@register_attention("softmax")
class SoftmaxAttention(OpAttention):
    """Softmax attention by torch's fused kernel, with padding on either side and a state that grows.

    ``scaled_dot_product_attention`` with scale 1/sqrt(d); shapes and masks as in ``InnerAttention``. A padding mask in
    a causal module costs O(n m) memory for the combined mask. The state of ``extend`` holds all keys and values so far,
    so it grows. torch's fused kernel has no second-order gradients on a CPU; they exist inside
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``. Raises ValueError for shapes or masks that do not fit.
    """

    about = About(
        "softmax attention", "Vaswani et al., NeurIPS 2017", "n² d", "2n d", url="https://arxiv.org/abs/1706.03762"
    )
    supports = frozenset({"causal", "bidirectional", "cross"})
    linear_cost = False
    permutation_equivariant = True
    weighted_mean = True
    op = staticmethod(softmax_attention)
    reference_op = staticmethod(softmax_attention_reference)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """q (B, H, n, d), k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e); dropout acts on single weights."""
        masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
        return self.apply_op(*self.operands(q, k, v), **masks, **self.packing(segment_ids), dropout_p=dropout_p)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        segment_ids: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, e) and the state after them; dropout acts on single weights."""
        if dropout_p == 0.0:
            return super().extend(q, k, v, padding_mask, state, segment_ids)
        masks = {"key_padding_mask": padding_mask, "query_padding_mask": padding_mask}
        tensors, states = self.operands(q, k, v), {"initial_state": state, "return_state": True}
        return self.apply_op(*tensors, **masks, **states, **self.packing(segment_ids), dropout_p=dropout_p)
