"""LSH attention of the Reformer: a token attends to tokens that random rotations put into the same bucket.

Kitaev, Kaiser, Levskaya, *Reformer: The Efficient Transformer*, ICLR 2020, section 2.
"""

import torch
from torch import Tensor

from ..shared.checks import check_masks, check_positive_int, check_query_key_value, shape_of
from ..shared.held_tokens import held_length
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, check_continuation, state_of_sums, zero_state
from ..shared.unit_vectors import unit_vectors
from . import decoding
from .hashes import buckets_of, codes_of, sorted_order
from .rounds import attend_rounds, together


@takes_segments("q", "v")
def reformer_attention(
    q: Tensor,
    v: Tensor,
    rotations: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """softmax over j in P_i of q_i·k_j with k_j = q_j / |q_j|, times v_j (equations 2 to 6).

    P_i are the keys that i finds in any round. They are in its bucket, argmax [q R ; -q R] for R in ``rotations``
    (R, d, D) from ``draw_rotations``. Tokens are sorted by bucket and position and cut into chunks of
    C = ``chunk_size``: i finds keys of its chunk and of the two neighbouring chunks. Causal, i finds the last C keys of
    its bucket up to itself, because the paper's chunks would depend on later tokens; see the README. A token attends
    to itself only if it finds nothing else.

    q (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. Masks: bool (B, n), True = padding; a padded query
    gives 0, and so does a token that is padding as a key. Cost: O(R n C (d + e + R) + R n D d + R n log n) time and
    O(R n C) memory. ``initial_state`` and ``return_state`` (causal) continue a sequence: the state has ``k``
    (B, H, L, d), ``v`` (B, H, L, e) and ``codes`` (B, H, L, R) of the tokens that may still be found, at most
    L = R 2D C, and ``count`` (B, H, R, 2D). One token costs O(L (d + e + R)).

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask or state that does not fit, or a state without ``causal``.
    """
    check_positive_int("chunk_size", chunk_size)
    check_query_key_value(q, q, v, one_length=True, names=("q", "q", "v"))
    if not isinstance(rotations, Tensor) or rotations.dim() != 3 or rotations.shape[1] != q.shape[3]:
        raise ValueError(
            f"q has {q.shape[3]} channels and rotations {shape_of(rotations)}; allowed: (rounds, channels of q, "
            "directions)"
        )
    check_masks(key_padding_mask, q, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    held_count = held_length(initial_state, "k", decoding.most_held(rotations, chunk_size))
    shapes = decoding.state_shapes(q, v, rotations, held_count)
    state = state_of_sums(initial_state, shapes, compute_dtype(q), q)
    with autocast_off(q):
        tokens = _prepared(q, v, key_padding_mask)
        if not causal:
            buckets = buckets_of(tokens[0], rotations, key_padding_mask)
            order, place = sorted_order(buckets)
            codes = codes_of(buckets, place.div(chunk_size, rounding_mode="floor"))
            out = together(*attend_rounds(*tokens, order, place, codes, chunk_size, False))
            return _cleared(out, key_padding_mask, query_padding_mask).to(v.dtype)
        out, state = _causal(*tokens, rotations, key_padding_mask, chunk_size, shapes, state, return_state)
    out = _cleared(out, key_padding_mask, query_padding_mask).to(v.dtype)
    return (out, state) if return_state else out


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotations: Tensor,
    padding_mask: Tensor | None,
    chunk_size: int,
    shapes: dict[str, tuple[int, ...]],
    state: State | None,
    return_state: bool,
) -> tuple[Tensor, State | None]:
    """The outputs (B, H, n, e) of ``_prepared`` tokens after ``state``, which has ``shapes``, and the next state."""
    buckets, is_step = buckets_of(q, rotations, padding_mask), q.shape[2] == 1
    order, place = (None, None) if is_step else sorted_order(buckets)
    state = zero_state(shapes, k.dtype, k.device) if state is None else state
    ranks, count = decoding.ranks_of(buckets, place, state["count"])
    codes = codes_of(buckets, ranks)
    if padding_mask is not None:
        codes = codes.masked_fill(padding_mask[:, None, None], 0)
    if is_step:
        out = decoding.step(q, k, v, codes, state, chunk_size)
    else:
        outs, totals = attend_rounds(q, k, v, order, place, codes, chunk_size, True)
        if state["k"].shape[2]:
            earlier = decoding.attend_held(q, codes, state, 2 * rotations.shape[2], chunk_size)
            outs, totals = (torch.cat(pair, dim=2) for pair in zip((outs, totals), earlier))
        out = together(outs, totals)
    if not return_state:
        return out, None
    most = decoding.most_held(rotations, chunk_size)
    return out, decoding.extend_state(state, k, v, codes, count, chunk_size, most)


def _prepared(q: Tensor, v: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and unit keys (B, H, n, d) and values (B, H, n, e), in the dtype for sums and 0 at padding."""
    dtype = compute_dtype(q)
    q = zero_padding(q.to(dtype), padding_mask)
    return q, unit_vectors(q), zero_padding(v.to(dtype), padding_mask)


def _cleared(out: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None) -> Tensor:
    """``out`` with 0 for tokens that are padding, as a key or as a query."""
    return zero_padding(zero_padding(out, key_padding_mask), query_padding_mask)
