"""The quadratic attention of the gated attention unit: single-headed, relu² in place of softmax, in blocks of rows.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time* (FLASH), ICML 2022, section 2. relu² needs no running maximum,
so rows are computed block by block and recomputed in the backward pass, and nothing of size n x n is kept.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..shared.checks import check_choice, check_masks, check_query_key_value
from ..shared.heads import with_heads
from ..shared.kv_cache import extend_kv_cache
from ..shared.packed import takes_segments
from ..shared.padding import padding_or_none, put_back, real_first, real_positions, take, zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.relative_bias import bias_at, bias_rows, check_bias
from ..shared.score_kernels import SCORE_KERNELS, score_kernel
from ..shared.state import State, check_continuation
from ..shared.tracing import may_checkpoint

#: Rows of a block: the rows of the score matrix that exist at the same time.
BLOCK_ROWS = 256


@takes_segments("q", "k", "v", bias=True)
def gau_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    divisor: float | None = None,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    kernel: str = "relu2",
    first_softmax: bool = False,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Σ_j kernel(q_i·k_j / divisor + bias_ij) v_j, over all real j, or j <= i when causal (FLASH, section 2).

    q and k (B, n, s), v (B, n, e) -> (B, n, e), or with heads (B, H, n, s) and (B, H, n, e) -> (B, H, n, e); v's dtype.
    ``key_padding_mask`` and ``query_padding_mask``: bool (B, n), True = padding, on any side; positions count real
    keys, and a token that is padding, as a key or as a query, gives 0. Cost: O(n² (s + e)) time, O(n) memory, backward
    included.

    Args:
        bias: (2n-1,), entry r + n - 1 for a query r tokens after its key, or (n, n); with heads (H, 2n-1), (H, n, n).
        divisor: divides the scores. None: the number of real tokens that the query sees, without padding (relu2,
            laplace), or √s (softmax). With a constant, training and decoding agree; the paper uses the maximum
            training length.
        kernel: ``relu2``, ``softmax`` or ``laplace``; see ``score_kernel``.
        first_softmax: the first real token attends with softmax, whatever the kernel (not causal; fine-tuning).
        initial_state, return_state: continue a causal sequence. The state holds all tokens so far, ``k``, ``v`` and
            ``padding_mask`` (B, m), so it grows; the n of ``bias`` is then the number of all tokens, including these m.
            With ``segment_ids``, m is ``k.shape[2]`` of the state, which drops documents that have ended.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, dtype, mask, bias, name or state that does not fit; a divisor that is not above 0;
            ``first_softmax`` with ``causal``, or a state without it.
    """
    check_choice("kernel", kernel, SCORE_KERNELS)
    if divisor is not None and not divisor > 0.0:
        raise ValueError(f"divisor is {divisor!r}; allowed: above 0, or None")
    if first_softmax and causal:
        raise ValueError(
            "first_softmax is True with causal=True; allowed: False, since the first token sees itself only"
        )
    (q, k, v), without_heads = with_heads(("q", "k", "v"), (q, k, v))
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    q = zero_padding(q, query_padding_mask)  # values at padding must not reach any gradient
    check_continuation(causal, initial_state, return_state)
    remember = initial_state is not None or return_state
    history = extend_kv_cache({"k": k, "v": v}, key_padding_mask, initial_state) if remember else None
    check_bias(bias, k.shape[2] if history is None else history["k"].shape[2], q.shape[1], q, "the number of tokens")
    with autocast_off(q):
        if initial_state is None:
            out = _whole(q, k, v, bias, causal, divisor, key_padding_mask, kernel, first_softmax)
        else:
            out = _continued(q, history, bias, divisor, key_padding_mask, kernel)
    out = zero_padding(out, query_padding_mask).to(v.dtype)
    out = out.squeeze(1) if without_heads else out  # (B, 1, n, e) -> (B, n, e)
    return (out, history) if return_state else out


def _divided(q: Tensor, divisor: float | None, kernel: str, visible: Tensor) -> Tensor:
    """q (B, H, n, s) divided by the divisor of its scores; ``visible`` counts the real tokens that each query sees."""
    if divisor is not None:
        return q / divisor
    return q / math.sqrt(q.shape[3]) if kernel == "softmax" else q / visible


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    divisor: float | None,
    padding_mask: Tensor | None,
    kernel: str,
    first_softmax: bool,
) -> Tensor:
    """The outputs (B, H, n, e) of a whole sequence, block of rows by block of rows."""
    n, dtype = q.shape[2], compute_dtype(q)
    order = real_first(padding_mask)
    q, k, v = (take(zero_padding(x.to(dtype), padding_mask), order) for x in (q, k, v))
    bias = None if bias is None else bias.to(dtype)
    position = torch.arange(n, device=q.device)
    hidden = None  # padding is after the real tokens now, so causal queries of real tokens do not see it
    visible = (position[:, None] + 1).to(dtype)  # (n, 1)
    if not causal:
        real = torch.full((q.shape[0],), n, device=q.device) if padding_mask is None else (~padding_mask).sum(1)
        visible = real.clamp(min=1).to(dtype)[:, None, None, None]
        hidden = None if padding_mask is None else (position >= real[:, None])[:, None, None, :]  # (B, 1, 1, n)
    divided = _divided(q, divisor, kernel, visible)
    rows = []
    for block in range(-(-n // BLOCK_ROWS)):  # not range(0, n, ...), which fixes n in a compiled graph
        start, stop = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, n)
        keys = stop if causal else n
        tensors = (divided[:, :, start:stop], k[:, :, :keys], v[:, :, :keys], bias, hidden)
        arguments = (*tensors, causal, kernel, start, stop, n)
        # A single block is not larger than its inputs, so it is kept and not recomputed.
        again = n > BLOCK_ROWS and may_checkpoint()
        rows.append(checkpoint(_block, *arguments, use_reentrant=False) if again else _block(*arguments))
    out = torch.cat(rows, dim=2)
    if first_softmax:
        first = _block(q[:, :, :1] / math.sqrt(q.shape[3]), k, v, bias, hidden, False, "softmax", 0, 1, n)
        out = torch.cat([first, out[:, :, 1:]], dim=2)
    return zero_padding(put_back(out, order), padding_mask)


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    causal: bool,
    kernel: str,
    start: int,
    stop: int,
    tokens: int,
) -> Tensor:
    """The outputs (B, H, stop - start, e) of these rows for divided q.

    The causal mask is made here, so that it is not kept.
    """
    if causal:
        position = torch.arange(k.shape[2], device=k.device)
        hidden = position > position[start:stop, None]  # (rows, keys)
    scores = q @ k.transpose(-2, -1)  # (B, H, rows, keys)
    if bias is not None:
        scores = scores + bias_rows(bias, tokens, start, stop, k.shape[2])
    return score_kernel(scores, kernel, hidden) @ v


def _continued(
    q: Tensor,
    history: State,
    bias: Tensor | None,
    divisor: float | None,
    padding_mask: Tensor | None,
    kernel: str,
) -> Tensor:
    """The outputs (B, H, n, e) of the last n of the m tokens of ``history``; O(n m) memory."""
    n, dtype, padding = q.shape[2], compute_dtype(q), padding_or_none(history["padding_mask"])
    order = real_first(padding)
    k, v = (take(zero_padding(history[name].to(dtype), padding), order) for name in ("k", "v"))
    tokens = torch.arange(k.shape[2], device=q.device)
    positions = (tokens[None] if padding is None else real_positions(padding))[:, -n:]
    q = zero_padding(q.to(dtype), padding_mask)
    divided = _divided(q, divisor, kernel, (positions + 1).to(dtype)[:, None, :, None])
    hidden = None if padding is None and n == 1 else tokens > positions[:, None, :, None]  # (B, 1, n, m)
    scores = divided @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias_at(bias.to(dtype), k.shape[2], positions)
    return zero_padding(score_kernel(scores, kernel, hidden) @ v, padding_mask)
