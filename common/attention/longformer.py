"""Longformer's attention as a module."""

from dataclasses import dataclass

from ..ops.longformer import longformer_attention
from ..ops.longformer.reference import longformer_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, count
from ._registry import register_attention


@dataclass(frozen=True)
class LongformerOptions(AttentionOptions):
    """Options of Longformer's attention; see ``common.ops.longformer_attention``."""

    window: int = count(512, "tokens that each token sees around itself, or up to itself if causal")
    global_tokens: int = count(1, "first tokens of a sequence, which see all and are seen by all")


@register_attention("longformer")
class LongformerAttention(OpAttention):
    """Softmax over a window and the first tokens, which see all and are seen by all; no parameters.

    Global tokens share the projections of all tokens, as in the Long Range Arena's code; in the paper they have their
    own. Windows have no dilation. An image is the sequence of its rows, after a class token if there is one. Shapes and
    masks as in ``InnerAttention``; options as in ``common.ops.longformer_attention``.
    """

    about = About(
        "Longformer's attention",
        "Beltagy et al., 2020, section 3.1",
        "n (w + g) d",
        "2d min(n, w) + 2d g",
        sizes={"w": "window", "g": "global_tokens"},
        url="https://arxiv.org/abs/2004.05150",
    )
    Options = LongformerOptions
    supports = frozenset({"causal", "bidirectional"})
    op = staticmethod(longformer_attention)
    reference_op = staticmethod(longformer_attention_reference)

    def state_tokens(self) -> int:
        """The window."""
        return self.options.window
