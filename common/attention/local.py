"""Local attention as a module."""

from dataclasses import dataclass

from torch import Tensor

from ..ops.local import attend
from ..ops.local.reference import local_attention_reference
from ..ops.shared.window_attention import WindowOptions, attend_in_window_scriptable
from ._base import OpAttention
from ._options import AttentionOptions, count, flag
from ._registry import register_attention


@dataclass(frozen=True)
class LocalOptions(AttentionOptions):
    """Options of local attention; see ``common.ops.local_attention``."""

    window: int = count(128, "tokens that each token sees, itself included")
    chunked: bool = flag(
        False, "each token sees the chunk of that many tokens that it is in, not those around it, as in the Arena"
    )


@register_attention("local")
class LocalAttention(OpAttention):
    """Softmax over a window of w tokens; no parameters, O(n w d), constant state.

    An image is the sequence of its rows. Shapes and masks as in ``InnerAttention``; options as in
    ``common.ops.local_attention``.
    """

    Options = LocalOptions
    supports = frozenset({"causal", "bidirectional", "images"})
    op = staticmethod(attend)
    reference_op = staticmethod(local_attention_reference)
    window: int
    chunked: bool

    def setup(self) -> None:
        super().setup()
        self.window, self.chunked = self.options.window, self.options.chunked

    def _attend_scriptable(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
    ) -> Tensor:
        options = WindowOptions(self.window, self.chunked, 0)
        return attend_in_window_scriptable(q, k, v, key_padding_mask, query_padding_mask, options, False)
