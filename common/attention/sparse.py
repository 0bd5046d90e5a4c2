"""The Sparse Transformer's attention as a module."""

from dataclasses import dataclass

from ..ops.sparse import PATTERNS, sparse_attention
from ..ops.sparse.reference import sparse_attention_reference
from ._base import OpAttention
from ._options import About, AttentionOptions, choice, count
from ._registry import register_attention


@dataclass(frozen=True)
class SparseOptions(AttentionOptions):
    """Options of the Sparse Transformer's attention; see ``common.ops.sparse_attention``."""

    pattern: str = choice(
        "fixed", PATTERNS, "tokens that are seen beside those nearby: some of each chunk, or each l-th"
    )
    stride: int = count(
        50,
        "tokens of a chunk (fixed) or between those that are seen (strided); cost is least near the root of the length",
    )
    columns: int = count(10, "tokens at the end of each other chunk that are seen, with the fixed pattern alone")


@register_attention("sparse")
class SparseAttention(OpAttention):
    """Softmax over tokens nearby and some far away, in fixed chunks or strided; no parameters.

    The bidirectional form has the same patterns in both directions; the paper and the Long Range Arena have only the
    causal one. The defaults are the Arena's. Decoding keeps all keys and values. An image is the sequence of its rows;
    ``strided`` with its width as the stride is a window and a column. Shapes and masks as in ``InnerAttention``;
    options as in ``common.ops.sparse_attention``.
    """

    about = About(
        "Sparse Transformer",
        "Child et al., 2019, section 4",
        "n (l + c n / l) d",
        "2n d",
        sizes={"l": "stride", "c": "columns"},
        url="https://arxiv.org/abs/1904.10509",
    )
    Options = SparseOptions
    supports = frozenset({"causal", "bidirectional"})
    linear_cost = False
    op = staticmethod(sparse_attention)
    reference_op = staticmethod(sparse_attention_reference)
