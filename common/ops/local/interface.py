"""Local attention: softmax over a sliding window of tokens, or over chunks that do not see each other.

The windows of Beltagy, Peters, Cohan, *Longformer*, 2020, section 3.1, without global tokens, and the chunks of the
Long Range Arena (Tay et al., ICLR 2021). The Arena's released code lays out n tokens as (w, n / w) and attends along
the first dimension, among tokens i, i + n / w, i + 2 n / w and so on: its published accuracies are of this variant.
"""

from torch import Tensor

from ..shared.checks import check_positive_int
from ..shared.packed import takes_segments
from ..shared.state import State
from ..shared.window_attention import WindowOptions, attend_in_window


@takes_segments("q", "k", "v")
def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    chunked: bool = False,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """softmax(q·k / √d) v over w = ``window`` tokens for each query.

    When causal, these are the last w tokens up to the query itself, otherwise the query, w // 2 tokens before and
    (w - 1) // 2 after it. With ``chunked`` they are the query's chunk among 0..w-1, w..2w-1 and so on, when causal up
    to the query. q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True =
    padding; windows and chunks count real keys, and a token that is padding, as a key or as a query, gives 0. Cost:
    O(n w (d + e)) time, O(n w) memory. ``initial_state`` and ``return_state`` (causal) continue a sequence: state
    ``count`` (B,), ``k`` (B, H, w, d), ``v`` (B, H, w, e), float32; O(w (d + e)) per token.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, number or state that does not fit, or a state without ``causal``.
    """
    check_positive_int("window", window)
    masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
    state = {"initial_state": initial_state, "return_state": return_state}
    return attend_in_window(q, k, v, WindowOptions(window, chunked, 0), causal=causal, **masks, **state)
