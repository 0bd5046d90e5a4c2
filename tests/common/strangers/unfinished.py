"""A mechanism whose author has not written its literal formula."""

from common.attention import OpAttention, register_attention
from common.ops import linear_attention


@register_attention("unfinished")
class UnfinishedAttention(OpAttention):
    """Linear attention."""

    op = staticmethod(linear_attention)
