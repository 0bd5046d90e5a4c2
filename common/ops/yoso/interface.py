"""YOSO-E: keys are weighted by the probability that random hashes of query and key are equal, in quadratic time.

Zeng, Xiong, Ravi, Acharya, Fung, Singh, *You Only Sample (Almost) Once: Linear Cost Self-Attention Via Bernoulli
Sampling*, ICML 2021, section 3. The linear cost of its title is that of YOSO, which samples the hashes in a CUDA
kernel; YOSO-E is the expectation of YOSO. The released code can add a depthwise convolution of v over the tokens,
``conv_window``, which is not implemented here.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..shared.checks import check_choice, check_masks, check_positive_int, check_query_key_value
from ..shared.kv_cache import extend_kv_cache
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, check_continuation
from ..shared.tracing import may_be_exported, may_checkpoint
from ..shared.unit_vectors import unit_vectors

#: Derivative of the weights by the cosine: (tau / 2) w, the paper's lower bound of the exact one, or the exact one.
GRADIENTS = ("bound", "exact")
#: Largest cosine: at 1 the exact derivative is infinite. The limit changes a weight by less than 0.05 tau %.
COSINE_LIMIT = 1.0 - 1e-6
#: Rows of a block: the rows of weights that exist at the same time.
BLOCK_ROWS = 256


@takes_segments("q", "k", "v")
def yoso_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    tau: int = 9,
    gradient: str = "bound",
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """y_i / |y_i| with y_i = Σ_j w_ij v_j and w_ij = (1 - arccos(q_i·k_j / |q_i||k_j|) / π)^tau; j <= i when causal.

    w is the probability that q_i and k_j are on the same sides of ``tau`` random hyperplanes. q (B, H, n, d),
    k (B, H, m, d), v (B, H, m, e) -> (B, H, n, e) in v's dtype: unit vectors, 0 where there is no key. Masks: bool
    (B, m) and (B, n), True = padding; a padded query gives 0. Cost: O(n m (d + e)) time and O(n + m) memory, backward
    included. ``initial_state`` and ``return_state`` (causal) continue a sequence: the state holds all tokens so far,
    ``k``, ``v`` and ``padding_mask`` (B, m), so it grows.

    Args:
        gradient: of a weight by the cosine x. "bound": (tau / 2) w, as in the paper and its code, a constant for second
            derivatives. "exact": tau w^(1 - 1/tau) / (π √(1 - x²)). In both cases x is clamped to ±(1 - 1e-6), beyond
            which its gradient is 0: there the exact gradient grows to infinity, and its direction is lost to rounding.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, name or state that does not fit, or a state without ``causal``.
    """
    check_positive_int("tau", tau)
    check_choice("gradient", gradient, GRADIENTS)
    check_query_key_value(q, k, v, causal)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    check_continuation(causal, initial_state, return_state)
    dtype, history = v.dtype, None
    if initial_state is not None or return_state:
        history = extend_kv_cache({"k": k, "v": v}, key_padding_mask, initial_state)
        k, v, key_padding_mask = history["k"], history["v"], history["padding_mask"]
    with autocast_off(q):
        q, k, v = _prepared(q, k, v, key_padding_mask, query_padding_mask)
        if not causal and may_be_exported():  # a number of blocks would be fixed in the graph
            hidden = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
            out = _attended(q, k, v, hidden, tau, gradient)
        else:
            out = _in_blocks(q, k, v, key_padding_mask, causal, tau, gradient)
        out = zero_padding(out, query_padding_mask).to(dtype)
    return (out, history) if return_state else out


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, query_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit queries (B, H, n, d), unit keys (B, H, m, d) and values (B, H, m, e) in the dtype for sums, 0 at padding."""
    dtype = compute_dtype(q)
    q = unit_vectors(zero_padding(q.to(dtype), query_padding_mask))
    k = unit_vectors(zero_padding(k.to(dtype), key_padding_mask))
    return q, k, zero_padding(v.to(dtype), key_padding_mask)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, causal: bool, tau: int, gradient: str
) -> Tensor:
    """The outputs (B, H, n, e), block by block of rows; each block is recomputed in the backward pass.

    Causal queries are the last n of the m tokens.
    """
    n, before = q.shape[2], k.shape[2] - q.shape[2]
    rows = []
    for block in range(-(-n // BLOCK_ROWS)):  # not range(0, n, ...), which fixes n in a compiled graph
        start, stop = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, n)
        keys = before + stop if causal else k.shape[2]
        mask = None if padding_mask is None else padding_mask[:, None, None, :keys]
        arguments = (q[:, :, start:stop], k[:, :, :keys], v[:, :, :keys], mask, causal, tau, gradient)
        # A single block is not larger than its inputs, so it is kept and not recomputed.
        again = n > BLOCK_ROWS and may_checkpoint()
        rows.append(checkpoint(_block, *arguments, use_reentrant=False) if again else _block(*arguments))
    return torch.cat(rows, dim=2)


def _block(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, tau: int, gradient: str) -> Tensor:
    """``_attended`` for some queries; if causal, these are the last tokens of the keys, and the mask is made here."""
    if causal:
        position = torch.arange(k.shape[2], device=k.device)
        later = position > position[k.shape[2] - q.shape[2] :, None]  # (rows, keys)
        hidden = later if hidden is None else hidden | later
    return _attended(q, k, v, hidden, tau, gradient)


def _attended(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, tau: int, gradient: str) -> Tensor:
    """Weighted sums of unit length (B, H, n, e), for unit q and k; True in ``hidden`` (..., n, m) means no weight."""
    cosines = (q @ k.transpose(-2, -1)).clamp(-COSINE_LIMIT, COSINE_LIMIT)
    if gradient == "bound":
        fixed = (1.0 - torch.acos(cosines.detach()) / math.pi).pow(tau)
        weights = fixed + (tau / 2 * fixed) * (cosines - cosines.detach())
    else:
        weights = (1.0 - torch.acos(cosines) / math.pi).pow(tau)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return unit_vectors(weights @ v)
