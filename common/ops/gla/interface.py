"""Gated linear attention: a sum in which each channel of the keys decays by a gate that depends on the token.

Yang, Wang, Shen, Panda, Kim, *Gated Linear Attention Transformers with Hardware-Efficient Training*, ICML 2024.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..shared.checks import check_masks, check_positive_int, check_query_key_value, check_tokens, shape_of
from ..shared.chunks import CHUNK_SIZE
from ..shared.cpu.dispatch import step_of
from ..shared.feature_sums import decayed_sums, step_by_kernels
from ..shared.log_sigmoid import log_sigmoid
from ..shared.packed import takes_segments
from ..shared.padding import zero_padded_tokens, zero_padding
from ..shared.precision import autocast_off, compute_dtype, in_dtype
from ..shared.state import State, state_of_sums


@takes_segments("q", "k", "v", "x")
def gla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    gate_down: Tensor,
    gate_up: Tensor,
    gate_bias: Tensor,
    *,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    temperature: float = 16.0,
    chunk_size: int = CHUNK_SIZE,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """q_t·S_t / √d with S_t = diag(α_t) S_(t-1) + k_t v_tᵀ and α_t = sigmoid(W₂ W₁ x_t + b)^(1/temperature), Eq. 3.

    α_t has one entry for each channel of each head's keys (section 4.4). There is no normaliser. q, k (B, H, n, d),
    v (B, H, n, e) -> (B, H, n, e) in v's dtype; x (B, n, D) are the tokens before their projection, W₁ is ``gate_down``
    (r, D), W₂ ``gate_up`` (H d, r) and b ``gate_bias`` (H d,). Masks: bool (B, n), True = padding; a padded query gives
    0, a padded key neither adds nor forgets. Cost: O(n d (C + e) + n r (D + H d)) time and O(n (d + e) log C +
    (n / C) d e) memory with C = ``chunk_size``, rounded up to a power of two. ``initial_state`` and ``return_state``
    continue a sequence: state ``sum_kv`` (B, H, d, e), float32.

    ``segment_ids`` (B, n), integers that never decrease: the documents of a row; see ``shared/documents.py``.

    Raises:
        ValueError: a shape, mask, number or state that does not fit; ``causal=False``.
    """
    check_positive_int("chunk_size", chunk_size)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature!r}; allowed: a number above 0")
    if not causal:
        raise ValueError("causal is False; allowed for gated linear attention: True")
    check_query_key_value(q, k, v, one_length=True)
    check_masks(key_padding_mask, k, query_padding_mask, q)
    _check_gate(q, gate_down, gate_up, gate_bias)
    check_tokens(x, q, gate_down.shape[1])
    dtype = compute_dtype(q)
    state = state_of_sums(initial_state, {"sum_kv": (*q.shape[:2], q.shape[3], v.shape[3])}, dtype, q)
    with autocast_off(q):
        x = zero_padded_tokens(x.to(dtype), key_padding_mask)  # values at padding must not reach the gradients
        logits = F.linear(F.linear(x, gate_down.to(dtype)), gate_up.to(dtype), gate_bias.to(dtype))  # (B, n, H d)
        # log α (B, H, n, d), 0 at padding: a padded token does not change the sums.
        log_decay = (log_sigmoid(logits) / temperature).unflatten(2, (q.shape[1], q.shape[3])).transpose(1, 2)
        log_decay = zero_padding(log_decay, key_padding_mask)
        queries = zero_padding(q.to(dtype), query_padding_mask) * q.shape[3] ** -0.5
        keys, values = (zero_padding(y.to(dtype), key_padding_mask) for y in (k, v))
        initial = None if state is None else state["sum_kv"]
        out, sum_kv = decayed_sums(queries, keys, values, log_decay, chunk_size, initial, v.dtype)
    out = out.to(v.dtype)
    return (out, {"sum_kv": sum_kv}) if return_state else out


@step_of(gla_attention)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    x: Tensor,
    gate_down: Tensor,
    gate_up: Tensor,
    gate_bias: Tensor,
    temperature: float,
    **_: Any,
) -> tuple[Tensor, State]:
    """``gla_attention`` of one token after ``state``; see ``step_of``."""
    down, up, bias = (in_dtype(y, q.dtype) for y in (gate_down, gate_up, gate_bias))
    log_decay = (F.logsigmoid(F.linear(F.linear(x, down), up, bias)) / temperature).view(q.shape)
    out, _, sum_kv, _ = step_by_kernels(q * q.shape[3] ** -0.5, k, v, log_decay, state["sum_kv"], None)
    return out, {"sum_kv": sum_kv}


def _check_gate(q: Tensor, gate_down: Tensor, gate_up: Tensor, gate_bias: Tensor) -> None:
    channels = q.shape[1] * q.shape[3]
    weights = {"gate_down": gate_down, "gate_up": gate_up, "gate_bias": gate_bias}
    for (name, tensor), dims in zip(weights.items(), (2, 2, 1)):
        if not isinstance(tensor, Tensor) or tensor.dim() != dims:
            raise ValueError(f"{name} is {shape_of(tensor)}; allowed: a tensor of {dims} dimensions")
    expected = {"gate_up": (channels, gate_down.shape[0]), "gate_bias": (channels,)}
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}; allowed for q {tuple(q.shape)}: {shape}")
