"""Local attention as a module."""

from dataclasses import dataclass

from ..ops.local import local_attention
from ..ops.local.reference import local_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, count, flag
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
    """Softmax over a window of tokens, or over chunks; no parameters.

    An image is the sequence of its rows. Shapes and masks as in ``InnerAttention``; options as in
    ``common.ops.local_attention``.
    """

    about = About(
        "local attention",
        "Beltagy et al., Longformer, 2020, section 3.1; Tay et al., ICLR 2021",
        "n w d",
        "2d min(n, w)",
        sizes={"w": "window"},
        url="https://arxiv.org/abs/2004.05150",
    )
    Options = LocalOptions
    supports = frozenset({"causal", "bidirectional"})
    op = staticmethod(local_attention)
    reference_op = staticmethod(local_attention_reference)

    def state_tokens(self) -> int:
        """The window."""
        return self.options.window
