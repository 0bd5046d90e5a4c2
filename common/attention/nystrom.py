"""Nyström attention, from the Nyströmformer, as a module."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ops.nystrom import MOST_ITERATIONS, nystrom_attention
from ..ops.nystrom.reference import nystrom_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, count, default_of
from ._registry import register_attention


@dataclass(frozen=True)
class NystromOptions(AttentionOptions):
    """Options of Nyström attention; see ``common.ops.nystrom_attention``."""

    landmarks: int = count(
        default_of(nystrom_attention, "landmarks"),
        "segments of a sequence, whose means stand for it; the authors have 32 to 256",
    )
    iterations: int = count(
        default_of(nystrom_attention, "iterations"),
        "steps towards the inverse of the landmarks' attention; the paper has 6",
        most=MOST_ITERATIONS,
    )
    conv_kernel: int | None = count(
        35,
        "tokens under the convolution of v that is added, an odd number; 0 for none. The authors have 35 in the Long "
        "Range Arena and 65 in their language model",
        optional=True,
        odd=True,
        setup_only=True,
    )


@register_attention("nystrom")
class NystromAttention(OpAttention):
    """Softmax attention through the means of segments, the landmarks; not causal.

    ``conv`` holds the filters of the convolution, one for each head, or is None. Self-attention. Shapes and masks as in
    ``InnerAttention``; options as in ``common.ops.nystrom_attention``.
    """

    about = About(
        "Nyström attention",
        "Xiong et al., AAAI 2021",
        "n m d + m³",
        sizes={"m": "landmarks"},
        map="the weights, with the convolution of the values that is added; entries may be negative",
        url="https://arxiv.org/abs/2102.03902",
    )
    Options = NystromOptions
    supports = frozenset({"bidirectional"})
    needs = frozenset({"num_heads"})
    op = staticmethod(nystrom_attention)
    reference_op = staticmethod(nystrom_attention_reference)

    def setup(self) -> None:
        heads, kernel = self.shape.num_heads, self.options.conv_kernel
        self.conv = None if kernel is None else nn.Conv2d(heads, heads, (kernel, 1), groups=heads, bias=False)

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        if self.conv is not None:
            self.conv.reset_parameters()

    def op_kwargs(self) -> dict[str, Any]:
        """The filters of the convolution."""
        return {"conv_weight": None if self.conv is None else self.conv.weight}
