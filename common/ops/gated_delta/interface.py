"""The gated delta rule: a decaying memory, in which a key's old value is erased before its new value is written.

Yang, Kautz, Hatamizadeh, *Gated Delta Networks: Improving Mamba2 with Delta Rule*, ICLR 2025; without the gate Yang,
Wang, Zhang, Shen, Kim, *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*, NeurIPS 2024,
after Schlag, Irie, Schmidhuber, *Linear Transformers Are Secretly Fast Weight Programmers*, ICML 2021.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import check_choice, check_masks, check_positive_int, check_query_key_value
from ..shared.packed import takes_segments
from ..shared.padding import zero_padding
from ..shared.precision import autocast_off, compute_dtype
from ..shared.state import State, state_of_sums
from ..shared.tracing import is_compiled, runs_eagerly
from .causal import delta_chunks
from .causal_backward import delta_blocks
from .decoding import delta_step
from .operator import delta_operator

#: Activations of queries and keys, or of values.
ACTIVATIONS = ("silu", "none")
#: Normalisations of queries and keys.
QK_NORMS = ("l2", "none")
#: Default number of tokens that are computed at once: on a CPU as fast as 16, and faster than 64.
_CHUNK_SIZE = 32
#: Added to |x|² before its root.
_EPS = 1e-6


@takes_segments("q", "k", "v", "beta", "log_decay")
def gated_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    qk_activation: str = "silu",
    qk_norm: str = "l2",
    v_activation: str = "silu",
    chunk_size: int = _CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """o_t = S_t q_t / √d with S_t = α_t S_(t-1) (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ (section 3.1), causal alone.

    q, k (B, H, n, d), v (B, H, n, e) -> (B, H, n, e) in v's dtype. ``beta`` (B, H, n) is β, from 0 to 1, or to 2 where
    eigenvalues may be negative. ``log_decay`` (B, H, n) is log α <= 0; without it α = 1, DeltaNet. ``qk_activation``
    and ``v_activation`` are applied to q, k and v, and ``qk_norm="l2"`` then makes q and k unit vectors,
    x / √(|x|² + 1e-6). Without it a key with β |k|² > 2 makes the memory grow. Masks: bool (B, n), True = padding; a
    padded query gives 0, a padded key neither adds, erases nor decays. Cost: O(n (C (C + d + e) + d e)) time and
    O(n (d + e) + (n / C) d e) memory with C = ``chunk_size``, which changes no result. ``initial_state`` and
    ``return_state`` continue a sequence: state ``memory`` (B, H, d, e), Sᵀ, float32.

    ``segment_ids`` (B, n), integers that never decrease along a row: its documents, which do not see each other;
    see ``shared/packed.py``.

    Raises:
        ValueError: a shape, mask, name, number or state that does not fit; ``causal=False``.
    """
    for name, value in (("qk_activation", qk_activation), ("v_activation", v_activation)):
        check_choice(name, value, ACTIVATIONS)
    check_choice("qk_norm", qk_norm, QK_NORMS)
    check_positive_int("chunk_size", chunk_size)
    if not causal:
        raise ValueError(f"causal is {causal}; allowed for the delta rule: True")
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    _check_of_tokens("beta", beta, q)
    if log_decay is not None:
        _check_of_tokens("log_decay", log_decay, q)
    dtype, shape = compute_dtype(q), (*k.shape[:2], k.shape[3], v.shape[3])
    state = state_of_sums(initial_state, {"memory": shape}, dtype, q)
    with autocast_off(q):
        queries, keys = (
            _directed(zero_padding(x.to(dtype), mask), qk_activation, qk_norm)
            for x, mask in ((q, query_padding_mask), (k, key_padding_mask))
        )
        values = _activated(zero_padding(v.to(dtype), key_padding_mask), v_activation)
        beta, log_decay = (None if x is None else _of_real(x.to(dtype), key_padding_mask) for x in (beta, log_decay))
        tensors = (queries * q.shape[3] ** -0.5, keys, values, beta, log_decay)
        if state is not None and q.shape[2] == 1:
            out, memory = delta_step(*tensors, state["memory"])
        else:
            memory = keys.new_zeros(shape) if state is None else state["memory"]
            out, memory = _implementation(*tensors, memory)(*tensors, chunk_size, memory)
    out = out.to(v.dtype)
    return (out, {"memory": memory}) if return_state else out


def _implementation(*tensors: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """The hand-written backward pass, as one operator if compiled on a CPU; plain PyTorch in other graphs."""
    if tensors[0].device.type == "cpu" and is_compiled():
        return delta_operator
    return delta_blocks if runs_eagerly(*(x for x in tensors if x is not None)) else delta_chunks


def _activated(x: Tensor, activation: str) -> Tensor:
    return F.silu(x) if activation == "silu" else x


def _directed(x: Tensor, activation: str, norm: str) -> Tensor:
    """Queries or keys for the memory: activated and normalised, 0 where x is 0."""
    x = _activated(x, activation)
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() if norm == "l2" else x


def _of_real(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``x`` (B, H, n), 0 at padding: nothing is written there, and nothing decays."""
    return x if padding_mask is None else x.masked_fill(padding_mask[:, None], 0.0)


def _check_of_tokens(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ValueError unless ``x`` is a floating point tensor (B, H, n) for q (B, H, n, d), on its device."""
    if not isinstance(x, Tensor) or x.shape != q.shape[:3]:
        actual = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} is {actual}; allowed for q of {tuple(q.shape)}: a tensor {tuple(q.shape[:3])}")
    if not x.is_floating_point() or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}; allowed: floating point on the device of q, {q.device}")
