"""LoLCATs: exact softmax attention to the last tokens, learned linear attention to earlier ones, one normaliser.

Zhang, Arora, Chalamala, Wu, Spector, Singhal, Ramesh, Ré, *LoLCATs: On Low-Rank Linearizing of Large Language Models*,
ICLR 2025, equation 7, with a sliding window.
"""

from torch import Tensor

from ..hedgehog.interface import check_maps
from ..shared.checks import check_choice, check_masks, check_positive_int, check_query_key_value, shape_of
from ..shared.chunks import CHUNK_SIZE
from ..shared.held_tokens import held_length
from ..shared.learned_features import LEARNED_MAPS
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, check_continuation, state_of_sums
from .decoding import extend, state_shapes
from .full import Maps, whole_sequence

#: Computed part of the formula; all but the first serve to inspect a part of a trained model.
PARTS = ("both", "window", "linear")


@takes_segments("q", "k", "v")
def lolcats_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    window_gate: Tensor,
    *,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    window: int,
    feature_map: str = "softmax",
    part: str = "both",
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Softmax attention to near tokens and learned linear attention to far ones, under one normaliser.

    y_i = (Σ_near a_ij v_j + phi(q_i)·Σ_far psi(k_j) v_jᵀ) / (Σ_near a_ij + phi(q_i)·Σ_far psi(k_j))

    with a_ij = γ e^(s_ij - c_i), s_ij = q_i·k_j / √d, c_i the largest s_ij of near tokens, and
    γ = sigmoid(``window_gate``) (H,) of each head. w = ``window`` tokens are near: the last ones up to the query when
    causal, otherwise the query, w // 2 tokens before and (w - 1) // 2 after it; all others are far. phi and psi are
    learned, with ``query_weight`` and ``key_weight``
    (H, r, d) and, unless they are None, ``query_bias`` and ``key_bias`` (H, r): for ``feature_map`` softmax
    [softmax(W x + b), softmax(-W x - b)], Hedgehog's, for relu relu(W x + b), T2R's. q, k (B, H, n, d), v (B, H, n, e)
    -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; windows count real keys, and a token that is
    padding, as a key or as a query, gives 0. Cost: O(n (w + r) (d + e)) time and O(n (w + C + r) + (n / C) r e) memory
    with C = ``chunk_size``. ``initial_state`` and ``return_state`` (causal) continue a sequence: state ``count`` (B,),
    the last L <= w keys and values ``k`` (B, H, L, d) and ``v`` (B, H, L, e), and the sums over all earlier tokens,
    ``sum_k`` (B, H, f) and ``sum_kv`` (B, H, f, e), float32, with f = 0 while L < w.

    ``part`` is "both" in the paper. "window" is only the softmax over the near tokens, "linear" only the learned linear
    attention, which then sees the near tokens too, with 1e-6 added to its normaliser. Both are for whole sequences.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, number, name or state that does not fit; maps of different r; a state without
            ``causal``, or with a ``part`` other than "both".
    """
    check_positive_int("window", window)
    check_positive_int("chunk_size", chunk_size)
    check_choice("feature_map", feature_map, LEARNED_MAPS)
    check_choice("part", part, PARTS)
    if part != "both" and (initial_state is not None or return_state):
        raise ValueError(f"part is {part!r}; allowed with initial_state or return_state: 'both'")
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    check_maps(q, k, query_weight, query_bias, key_weight, key_bias)
    if not isinstance(window_gate, Tensor) or window_gate.shape != q.shape[1:2] or window_gate.device != q.device:
        raise ValueError(
            f"window_gate is {shape_of(window_gate)}; allowed: a tensor ({q.shape[1]},) on {q.device}, one per head"
        )
    dtype, given = compute_dtype(q), v.dtype
    maps = Maps(query_weight, query_bias, key_weight, key_bias, feature_map, given)
    shapes = state_shapes(k, v, held_length(initial_state, "k", window), window, maps.number_of_features())
    state = state_of_sums(initial_state, shapes, dtype, q)
    with autocast_off(q):
        share = window_gate.to(dtype).sigmoid().view(-1, 1, 1)  # (H, 1, 1)
        q = zero_padding(zero_padding(q.to(dtype), query_padding_mask), key_padding_mask)
        k, v = (zero_padding(x.to(dtype), key_padding_mask) for x in (k, v))
        if state is None and not return_state:
            out = whole_sequence(q, k, v, maps, share, window, causal, key_padding_mask, chunk_size, part)
        else:
            out, state = extend(q, k, v, maps, share, window, key_padding_mask, chunk_size, shapes, state)
        out = zero_padding(zero_padding(out, key_padding_mask), query_padding_mask).to(given)
    return (out, state) if return_state else out
