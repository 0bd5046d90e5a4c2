"""Longformer: softmax over a sliding window of tokens, and over global tokens that see all and are seen by all.

Beltagy, Peters, Cohan, *Longformer: The Long-Document Transformer*, 2020, section 3.1.
"""

from torch import Tensor

from ..shared.checks import check_positive_int
from ..shared.packed import takes_segments
from ..shared.state import State
from ..shared.window_attention import WindowOptions, attend_in_window


@takes_segments("q", "k", "v")
def longformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    global_tokens: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """softmax(q·k / √d) v over a window of w = ``window`` tokens and the first g = ``global_tokens`` tokens.

    The window is that of ``local_attention``. The first g real tokens of a sequence are global: every token sees them,
    and they see every token. Causal, no token sees a later one: global tokens are seen by all later tokens. q, k
    (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; the window and the
    first tokens count real keys, and a token that is padding, as a key or as a query, gives 0. Cost: O(n (w + g)
    (d + e)) time, O(n (w + g)) memory. ``initial_state`` and ``return_state`` (causal) continue a sequence: state
    ``count`` (B,), ``k`` and ``v`` (B, H, w, channels) of the last tokens, ``global_k`` and ``global_v`` (B, H, g,
    channels), float32; O((w + g) (d + e)) per token.

    The paper has separate projections for global tokens; here, as in the Long Range Arena's code, all projections are
    shared. Windows are not dilated; the paper dilates some heads of its upper layers.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, number or state that does not fit, or a state without ``causal``.
    """
    check_positive_int("window", window)
    check_positive_int("global_tokens", global_tokens)
    masks = {"key_padding_mask": key_padding_mask, "query_padding_mask": query_padding_mask}
    state = {"initial_state": initial_state, "return_state": return_state}
    return attend_in_window(q, k, v, WindowOptions(window, False, global_tokens), causal=causal, **masks, **state)
